"""A session: one life of a pipeline on this rank, from connecting to the first failure.

It owns the connections, what has been learnt of messages, and the way a failure spreads; after
one, the pipeline drops the session whole and starts the next, so nothing stale survives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from fullbore.errors import PipelineError, RankError
from fullbore.ir import COMMUNICATION_KINDS, Action, Kind, Schedule
from fullbore.runtime.control import PeerLostError
from fullbore.runtime.device import Side
from fullbore.runtime.executor import Batch, Executor, Learnt
from fullbore.runtime.flight import Flight, program_part, source_of
from fullbore.runtime.meeting import Patience
from fullbore.runtime.microbatch import signature
from fullbore.runtime.recorder import ActivationMeter, SpanLog
from fullbore.runtime.stage import LossFunction, StageRunner
from fullbore.runtime.tied import TiedWeight, find_copies
from fullbore.runtime.watchdog import Watchdog
from fullbore.runtime.wiring import Rendezvous, Wiring
from fullbore.verify import LinkUse

__all__ = ["Session", "Setup"]

_Phase = str
_RUNNING = "the step's actions"
_TYING = "summing the gradients of tied weights"
_SPANS = 16  # in a flight record
_BETWEEN = "nothing: it is between two steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What stays the same over all lives of a pipeline on one rank.

    programs: for training (True) and evaluation (False), sends and receives in place. uses: what
    each asks of this rank's links. pairs: all directed pairs of ranks that talk.
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
    patience: Patience

    @property
    def schedule(self) -> Schedule:
        """The training schedule."""
        return self.programs[True]

    def holds(self, stage: int) -> bool:
        """Whether this rank holds a stage; -1 is the last one."""
        return stage % self.schedule.stages in self.stages


class Session:
    """One life: `run` steps until something fails, then `failed` is true for good.

    step: the number of the step in hand or to come; evaluating: whether an evaluation is in hand.
    """

    def __init__(self, setup: Setup, wiring: Wiring) -> None:
        self._setup, self._wiring = setup, wiring
        self.control, self._witness = wiring.control, wiring.witness
        self.failed = self.evaluating = False
        self.step = 1
        self._phase = _BETWEEN
        self._log: SpanLog | None = None
        self._tied_ranks = [_ranks_of(names, setup.schedule) for names in setup.tied]
        wiring.connect(pairs=setup.pairs, tied_ranks=self._tied_ranks)
        self.tied = self._tie()
        self._runners = self._make_runners()
        self._executors = {train: self._make_executor(train=train) for train in (True, False)}
        self._learnt = Learnt()
        self._numbers: dict[Hashable, int] = {}
        self._circumstances: Hashable = None
        self._executing: Executor | None = None
        self._watchdog = self._watch() if setup.rendezvous.ranks > 1 else None

    # -- making ------------------------------------------------------------------------------

    def _make_runners(self) -> dict[int, StageRunner]:
        setup = self._setup
        last = setup.schedule.stages - 1
        weight = 1.0 / setup.schedule.microbatches if setup.mean else 1.0
        return {
            stage: StageRunner(
                module=module,
                loss_fn=setup.loss_fn if stage == last else None,
                loss_weight=weight,
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
        )

    def _watch(self) -> Watchdog:
        patience = self._setup.patience
        return Watchdog(
            self,
            self._witness,
            stall_timeout_s=patience.stall_s,
            on_stall=patience.on_stall,
            timeout_s=patience.timeout_s,
        )

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
                )
            )
        return tied

    # -- running -----------------------------------------------------------------------------

    def run(
        self, batch: Batch, *, log: SpanLog | None, meter: ActivationMeter | None
    ) -> tuple[float | None, float]:
        """Run a batch; returns its loss, the same on every rank, and the seconds it took."""
        self._log, self._executing, self.evaluating = log, None, not batch.train
        with self.together("agreeing on the step"):
            agree = self._begin_to_agree(batch)
        begun_s = time.perf_counter()
        executor = self._executors[batch.train]
        try:
            if batch.train:
                for weight in self.tied:
                    weight.begin()
            with self.together(_RUNNING), torch.set_grad_enabled(batch.train):
                self._executing = executor
                executor.run(batch, agree, log=log, meter=meter)
            if batch.train:
                with self.together(_TYING):
                    for weight in self.tied:
                        weight.reduce()
        finally:
            for weight in self.tied:
                weight.restore()
        with self.together("sharing the loss"):
            loss = self._share_loss(batch)
        executor.finish()
        if self._setup.static_shapes:
            self._learnt.commit()
        return loss, time.perf_counter() - begun_s

    def _begin_to_agree(self, batch: Batch) -> Callable[[], Learnt]:
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
        rows = [float(batch.rows or 0) if self._setup.holds(stage) else 0.0 for stage in (0, -1)]
        wait = self.control.begin_total([*numbers, float(changed), *rows])

        def agree() -> Learnt:
            *agreed, changes, input_rows, target_rows = wait()
            _check_rows(int(input_rows), int(target_rows))
            batch.signatures = [int(number) for number in agreed]
            if changes:
                self._learnt = Learnt()
            return self._learnt

        return agree

    def _share_loss(self, batch: Batch) -> float | None:
        losses = [loss.double().reshape(()) for loss in batch.losses.values()]
        here = float(torch.stack(losses).sum()) if losses else 0.0
        total, count = self.control.total([here, float(len(losses))])
        if not count:
            return None
        return total / count if self._setup.mean else total

    @property
    def boundary_messages(self) -> int:
        """Most messages that this rank's links had posted, summed over links, so far."""
        return sum(link.posted_peak for link in self._wiring.incoming.values())

    def close(self) -> None:
        """Let go of links and threads; other ranks cannot step any more either."""
        self._stop_watching()
        if not self.failed:
            self._wiring.close()

    # -- failing -----------------------------------------------------------------------------

    @contextmanager
    def together(self, phase: _Phase) -> Iterator[None]:
        """If anything fails inside, every rank fails, with the same RankError.

        KeyboardInterrupt and its like fail the other ranks too, and pass through on this one.
        """
        self._phase = phase
        try:
            yield
        except Exception as error:
            raise self._fail(error, phase) from error
        except BaseException as error:
            self._fail(error, phase)
            raise
        finally:
            self._phase = _BETWEEN

    def _fail(self, error: BaseException, phase: _Phase) -> RankError:
        """Say why, or find out why, then close every connection so that all ranks fail."""
        self.failed = True
        flight = replace(self.flight(), error=f"{type(error).__name__}: {error}")
        if self._watchdog is not None:
            flight = replace(flight, still_s=self._watchdog.still_s())
        suspects = self._suspects(error, phase)
        if suspects:
            flight = replace(flight, waits=True, waits_for=suspects[0])
            verdict = self._witness.explain(flight, suspects=suspects)
        else:
            verdict = self._witness.report(
                flight,
                rank=self._setup.rendezvous.rank,
                action=flight.now,
                cause=f"{type(error).__name__}: {error}",
            )
        return self._end(verdict, flight)

    def give_up(self, *, rank: int, action: str | None, cause: str) -> RankError:
        """Fail for a reason that every rank knows and gives here."""
        self.failed = True
        flight = self.flight()
        verdict = self._witness.report(flight, rank=rank, action=action, cause=cause)
        return self._end(verdict, flight)

    def _end(self, verdict: RankError, flight: Flight) -> RankError:
        self._wiring.abort()
        told = self._witness.conclude(verdict, flight)
        self._stop_watching()
        for executor in self._executors.values():
            executor.reset()
        return told

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def _suspects(self, error: BaseException, phase: _Phase) -> Sequence[int]:
        """The ranks of which one must have closed a connection; none if the failure is our own."""
        if isinstance(error, PeerLostError):
            return [error.peer]
        if not _is_of_a_connection(error):
            return []
        if phase == _TYING:
            members = {r for ranks in self._tied_ranks for r in ranks}
            return sorted(members - {self._setup.rendezvous.rank})
        action = self._action() if phase == _RUNNING else None
        if action is not None and action.kind in COMMUNICATION_KINDS:
            there = 1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1
            return [self._setup.schedule.placement.stage_to_rank[action.stage + there]]
        return []

    def _action(self) -> Action | None:
        executor = self._executing
        return executor.actions[executor.at] if executor and executor.actions else None

    # -- being watched -------------------------------------------------------------------------

    def place(self) -> Hashable | None:
        """What changes whenever this rank moves on; None while it is in no call."""
        if self.failed or self._phase == _BETWEEN:
            return None
        at = self._executing.at if self._executing else None
        return self.step, self.evaluating, self._phase, at, self.control.waits_for

    def interrupt(self) -> None:
        """Close every connection, so that this rank stops waiting in one of them."""
        if not self.failed:
            self._wiring.abort()

    def flight(self) -> Flight:
        """What this rank is doing."""
        executor, phase, asked_of = self._executing, self._phase, self.control.waits_for
        told = Flight(
            rank=self._setup.rendezvous.rank,
            step=self.step,
            evaluating=self.evaluating,
            phase=phase,
            waits=asked_of is not None or phase == _TYING,
            waits_for=asked_of,
            spans=tuple(self._log.last(_SPANS)) if self._log is not None else (),
        )
        if executor is None or not executor.actions:
            return told
        schedule, at = self._setup.programs[not self.evaluating], executor.at
        at = at if phase == _RUNNING else len(executor.actions)
        part = program_part(schedule, executor.actions, at)
        told = replace(told, done=part.done, coming=part.coming, got=part.got)
        if phase != _RUNNING or asked_of is not None:
            return told
        action = executor.actions[at]
        source = source_of(schedule, action)
        told = replace(told, action=str(action))
        if source is None:
            return told
        return replace(told, waits=True, waits_for=source.rank, owed=str(source.action))


def _is_of_a_connection(error: BaseException) -> bool:
    """Whether gloo or NCCL lost a connection, and not the code of a stage something else."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and "gloo" in str(error)


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
