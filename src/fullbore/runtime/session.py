"""A session: one life of a pipeline on this rank, from connecting to the first failure.

It owns the connections, what has been learnt of messages, and the way a failure spreads; after
one, the pipeline drops the session whole and starts the next, so nothing stale survives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fullbore.errors import FullboreError, PipelineError, RankError
from fullbore.ir import COMMUNICATION_KINDS, Action, Kind, Schedule
from fullbore.runtime.batch import Batch, Learnt
from fullbore.runtime.control import PeerLostError
from fullbore.runtime.device import Side
from fullbore.runtime.executor import Executor
from fullbore.runtime.microbatch import signature
from fullbore.runtime.recompute import Recompute, recomputation_of
from fullbore.runtime.recorder import ActivationMeter, SpanLog
from fullbore.runtime.replicas import Edges, Replicas, completion_order
from fullbore.runtime.sharded import ShardedStages
from fullbore.runtime.split import SplitReport, split_backward_of
from fullbore.runtime.stage import CountFunction, LossFunction, StageRunner
from fullbore.runtime.tied import TiedWeight, find_copies
from fullbore.runtime.wiring import Rendezvous, Wiring
from fullbore.verify import LinkUse

__all__ = ["Session", "Setup"]

_Phase = str
_RUNNING = "the step's actions"
_REDUCING = "summing gradients over the replicas"
_TYING = "summing the gradients of tied weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What stays the same over all lives of a pipeline on one rank.

    programs: for training (True) and evaluation (False), sends and receives in place. uses: what
    each asks of this rank's links. pairs: all directed pairs of ranks that talk. count_fn: see
    `Pipeline`. reduce_dtype: in which gradients are summed over replicas.
    """

    rendezvous: Rendezvous
    side: Side
    stages: Mapping[int, nn.Module]
    programs: Mapping[bool, Schedule]
    uses: Mapping[bool, Sequence[LinkUse]]
    pairs: Sequence[tuple[int, int]]
    tied: Sequence[Mapping[int, str]]
    loss_fn: LossFunction | None
    mean: bool
    overlap: bool
    static_shapes: bool
    main_grad_dtype: torch.dtype | None = None
    recompute: Recompute = "none"
    count_fn: CountFunction | None = None
    reduce_dtype: torch.dtype | None = None

    @property
    def schedule(self) -> Schedule:
        """The training schedule."""
        return self.programs[True]

    def holds(self, stage: int) -> bool:
        """Whether this rank holds a stage; -1 is the last one."""
        return stage % self.schedule.stages in self.stages


class Session:
    """One life: `run` steps until something fails, then `failed` is true for good."""

    def __init__(self, setup: Setup, wiring: Wiring) -> None:
        self._setup, self._wiring = setup, wiring
        self.control, self.world = wiring.control, wiring.world
        self.failed = False
        self._tied_ranks = [_ranks_of(names, setup.schedule) for names in setup.tied]
        wiring.connect(pairs=setup.pairs, tied_ranks=self._tied_ranks)
        self.tied = self._tie()
        self._runners = self._make_runners()
        self._sharded = ShardedStages(setup.stages)
        self.replicas = self._make_replicas()
        self._executors = {train: self._make_executor(train=train) for train in (True, False)}
        self._learnt = Learnt()
        self._numbers: dict[Hashable, int] = {}
        self._circumstances: Hashable = None
        self._executing: Executor | None = None

    # -- making ------------------------------------------------------------------------------

    def _make_runners(self) -> dict[int, StageRunner]:
        setup = self._setup
        last = setup.schedule.stages - 1
        losses = setup.schedule.microbatches * setup.rendezvous.replicas
        weight = 1.0 / losses if setup.mean else 1.0
        return {
            stage: StageRunner(
                module=module,
                loss_fn=setup.loss_fn if stage == last else None,
                loss_weight=weight,
                split=split_backward_of(setup.schedule, stage, module),
                recomputation=recomputation_of(module, setup.recompute),
            )
            for stage, module in setup.stages.items()
        }

    def _make_executor(self, *, train: bool) -> Executor:
        setup = self._setup
        return Executor(
            schedule=setup.programs[train],
            rank=setup.rendezvous.rank,
            runners=self._runners,
            outgoing=self._wiring.outgoing,
            incoming=self._wiring.incoming,
            uses=setup.uses[train],
            device=setup.side.device,
            overlap=setup.overlap,
            edges=Edges(before_last=self._sharded.before_last, complete=self._complete)
            if train
            else None,
        )

    def _make_replicas(self) -> Replicas | None:
        setup, place = self._setup, self._setup.rendezvous
        if self._wiring.replica_group is None:
            return None
        peers = [row[place.rank] for i, row in enumerate(place.numbers) if i != place.replica]
        return Replicas(
            group=self._wiring.replica_group,
            peers=peers,
            stages=setup.stages,
            order=completion_order(tuple(setup.schedule.programs[place.rank])),
            reduce_dtype=setup.reduce_dtype,
        )

    def _complete(self, stage: int) -> None:
        if self.replicas is not None:
            self.replicas.complete(stage)

    def _tie(self) -> list[TiedWeight]:
        tied: list[TiedWeight] = []
        for names, group in zip(self._setup.tied, self._wiring.tied_groups, strict=True):
            copies = find_copies(names, self._setup.stages)
            if not copies:
                continue
            members = _ranks_of(names, self._setup.schedule)
            first = self._setup.schedule.placement.stage_to_rank[min(names)]
            distinct = {id(copy): copy for _, copy in sorted(copies.items())}
            tied.append(
                TiedWeight(
                    copies=list(distinct.values()),
                    owner=min(names) in copies,
                    group=group,
                    root=members.index(first),
                    gradient_dtype=self._setup.main_grad_dtype or next(iter(copies.values())).dtype,
                )
            )
        return tied

    # -- running -----------------------------------------------------------------------------

    def run(
        self, batch: Batch, *, log: SpanLog | None, meter: ActivationMeter | None
    ) -> tuple[float | None, float]:
        """Run a batch; returns its loss, the same on every rank, and the seconds it took."""
        with self.together("agreeing on the step"):
            agree = self._begin_to_agree(batch, meter)
        begun_s = time.perf_counter()
        executor = self._executors[batch.train]
        try:
            if batch.train:
                self._begin_gradients(batch)
            with self.together(_RUNNING), torch.set_grad_enabled(batch.train):
                self._executing = executor
                executor.run(batch, agree, log=log, meter=meter)
            if batch.train:
                self._finish_gradients()
            else:
                self._sharded.let_go()
        finally:
            for weight in self.tied:
                weight.restore()
            if self.replicas is not None:
                self.replicas.restore()
        with self.together("sharing the loss"):
            loss = self._share_loss(batch)
        executor.finish()
        if self._setup.static_shapes:
            self._learnt.commit()
        return loss, time.perf_counter() - begun_s

    def _begin_gradients(self, batch: Batch) -> None:
        """From here on gradients are this step's alone."""
        with self.together("weighing the loss"):
            if self._setup.count_fn is not None and self._setup.holds(-1):
                self._weigh_loss(sum(batch.counts))
        self._sharded.begin()
        if self.replicas is not None:
            self.replicas.begin()
        for weight in self.tied:
            weight.begin()

    def _weigh_loss(self, count: float) -> None:
        """The step's loss is a mean over what is counted on all replicas; of nothing: none."""
        if self.replicas is not None:
            count = self.replicas.total(count, self._setup.side.device)
        self._runners[self._setup.schedule.stages - 1].loss_weight = 1.0 / count if count else 0.0

    def _finish_gradients(self) -> None:
        """Wait for the sums over replicas, then sum those of tied weights over their copies."""
        with self.together(_REDUCING):
            if self.replicas is not None:
                self.replicas.finish()
        with self.together(_TYING):
            for weight in self.tied:
                weight.reduce()

    def _begin_to_agree(self, batch: Batch, meter: ActivationMeter | None) -> Callable[[], Learnt]:
        """Give the microbatches' signatures numbers that all ranks know; forget if any rank must.

        Layouts follow from the inputs' shapes, which the first stage's rank sees, and from
        circumstances, of which every rank sees its own. The answer is waited for only where a
        rank is about to talk: the first stage computes meanwhile.
        """
        circumstances = _circumstances(self._setup, batch)
        changed, self._circumstances = circumstances != self._circumstances, circumstances
        numbers = [0] * len(batch.inputs)
        if self._setup.holds(0):
            keys = [
                (signature(value), signature(kwargs), batch.train)
                for value, kwargs in zip(batch.inputs, batch.kwargs, strict=True)
            ]
            numbers = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
            batch.signatures = numbers
        if changed and meter is not None:
            meter.forget()
        rows = [float(batch.rows or 0) if self._setup.holds(stage) else 0.0 for stage in (0, -1)]
        wait = self.control.begin_total([*numbers, float(changed), *rows])

        def agree() -> Learnt:
            *agreed, changes, input_rows, target_rows = wait()
            _check_rows(int(input_rows), int(target_rows))
            batch.signatures = [int(number) for number in agreed]
            if changes:
                self._learnt = Learnt()
            if changes > changed and meter is not None:  # elsewhere, too
                meter.forget()
            return self._learnt

        return agree

    def _share_loss(self, batch: Batch) -> float | None:
        losses = [loss.double().reshape(()) for loss in batch.losses.values()]
        here = float(torch.stack(losses).sum()) if losses else 0.0
        total, given, counted = self.world.total([here, float(len(losses)), sum(batch.counts)])
        if not given:
            return None
        if self._setup.count_fn is not None:
            return total / counted if counted else math.nan
        return total / given if self._setup.mean else total

    @property
    def boundary_messages(self) -> int:
        """Most messages that this rank's links had posted, summed over links, so far."""
        return sum(link.posted_peak for link in self._wiring.incoming.values())

    def split_report(self) -> tuple[SplitReport, ...]:
        """Of each stage here whose backward is split."""
        runners = sorted(self._runners.items())
        return tuple(r.split.report(stage) for stage, r in runners if r.split is not None)

    def close(self) -> None:
        """Let go of links and threads."""
        self._wiring.close()
        self._let_go_of_blocks()

    def _let_go_of_blocks(self) -> None:
        for runner in self._runners.values():
            if runner.recomputation is not None:
                runner.recomputation.close()

    # -- failing -----------------------------------------------------------------------------

    @contextmanager
    def together(self, phase: _Phase) -> Iterator[None]:
        """If anything fails inside, every rank fails, with the same RankError.

        KeyboardInterrupt and its like fail the other ranks too, and pass through on this one.
        """
        try:
            yield
        except Exception as error:
            raise self._fail(error, phase) from error
        except BaseException as error:
            self._fail(error, phase)
            raise

    def _fail(self, error: BaseException, phase: _Phase) -> RankError:
        """Say why, or find out why, then close every connection so that all ranks fail."""
        self.failed = True
        action = self._action() if phase == _RUNNING else None
        suspects = self._suspects(error, action, phase)
        if suspects:
            known = self.control.explain(
                suspects=suspects, owed=self._owed(action), error=str(error)
            )
        else:
            known = self.control.report(
                rank=self.control.number,
                action=str(action) if action else phase,
                cause=f"{type(error).__name__}: {error}",
            )
        self._wiring.abort()
        for executor in self._executors.values():
            executor.reset()
        self._let_go_of_blocks()
        return known

    def _suspects(
        self, error: BaseException, action: Action | None, phase: _Phase
    ) -> Sequence[int]:
        """The ranks of which one must have closed a connection; none if the failure is our own."""
        numbers = self.control.numbers
        if isinstance(error, PeerLostError):
            return error.peers
        if not isinstance(error, RuntimeError) or isinstance(error, FullboreError):
            return []
        if phase == _TYING:
            members = {r for ranks in self._tied_ranks for r in ranks}
            return [numbers[r] for r in sorted(members - {self._setup.rendezvous.rank})]
        if action is not None and action.kind in COMMUNICATION_KINDS:
            there = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
            return [numbers[self._setup.schedule.placement.stage_to_rank[action.stage + there]]]
        return []

    def _action(self) -> Action | None:
        executor = self._executing
        return executor.actions[executor.at] if executor and executor.actions else None

    def _owed(self, action: Action | None) -> str | None:
        """The compute action of another rank that this one is waiting for."""
        if action is None or self._executing is None:
            return None
        source = self._executing.source_of(action)
        return str(source[1]) if source else None


def _circumstances(setup: Setup, batch: Batch) -> Hashable:
    """What decides the layouts of this rank's messages beside the step's inputs."""
    weights = (p for module in setup.stages.values() for p in module.parameters())
    kind = setup.side.device.type
    return (
        tuple((weight.requires_grad, weight.dtype) for weight in weights),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        tuple(signature(kwargs) for kwargs in batch.kwargs if kwargs),
    )


def _check_rows(inputs: int, targets: int) -> None:
    """Where first and last stage are on two ranks, neither sees the other's batch; 0: unknown."""
    if inputs and targets and inputs != targets:
        raise PipelineError(
            f"the inputs have {inputs} rows along dimension 0, the targets {targets}: both are "
            "split along it; if that is not meant, give a list with one entry a microbatch"
        )


def _ranks_of(names: Mapping[int, str], schedule: Schedule) -> tuple[int, ...]:
    return tuple(sorted({schedule.placement.stage_to_rank[stage] for stage in names}))
