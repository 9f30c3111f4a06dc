"""A session: one life of a pipeline on this rank, from connecting to the first failure.

It owns the connections and what has been learnt of messages. After a failure the pipeline drops
the session whole and starts the next, so nothing stale survives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from fullbore.ir import Schedule
from fullbore.runtime.agreement import Agreement
from fullbore.runtime.batch import Batch, Learnt
from fullbore.runtime.executor import Executor
from fullbore.runtime.life import REDUCING, RUNNING, TYING, Life
from fullbore.runtime.offload import Offloading, host_of
from fullbore.runtime.recompute import recomputation_of, where_placed
from fullbore.runtime.recorder import ActivationMeter, SpanLog
from fullbore.runtime.replicas import Edges, Replicas, completion_order
from fullbore.runtime.setup import Setup
from fullbore.runtime.sharded import ShardedStages
from fullbore.runtime.slices import Carry
from fullbore.runtime.split import SplitReport, split_backward_of
from fullbore.runtime.stage import StageRunner
from fullbore.runtime.tied import TiedWeight, find_copies
from fullbore.runtime.wiring import Wiring

__all__ = ["Session", "Setup"]


class Session:
    """One life: `run` steps until something fails.

    number: of this life, from 0. life: which step this rank is in, and whether it has failed.
    """

    def __init__(self, setup: Setup, *, number: int) -> None:
        self._setup = setup
        self._wiring = wiring = Wiring(
            setup.rendezvous, life=number, side=setup.side, records=setup.records
        )
        self.control, self.world = wiring.control, wiring.world
        tied_ranks = [_ranks_of(names, setup.schedule) for names in setup.tied]
        wiring.connect(pairs=setup.pairs, tied_ranks=tied_ranks)
        self.tied = self._tie()
        host = host_of(setup.side.device, setup.offload_folder)
        self._offloading = Offloading(setup.schedule, setup.stages, host)
        self._runners = self._make_runners()
        self._sharded = ShardedStages(setup.stages)
        self.replicas = self._make_replicas()
        self._executors = {train: self._make_executor(train=train) for train in (True, False)}
        self._agreement = Agreement(setup, self.control)
        self.life = Life(setup, wiring, tied_ranks=tied_ranks, let_go=self._let_go_of_failed)

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
                recomputation=recomputation_of(
                    module, where_placed(setup.recompute, setup.schedule, stage)
                ),
                offload=self._offloading.stages.get(stage),
                carry=Carry(setup.schedule.slices) if setup.schedule.slices > 1 else None,
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
                )
            )
        return tied

    def equalize(self) -> None:
        """Make replicas equal, and the copies of tied weights."""
        if self.replicas is not None:
            self.replicas.equalize()
        for weight in self.tied:
            weight.equalize()

    # -- running -----------------------------------------------------------------------------

    def run(
        self, batch: Batch, *, log: SpanLog | None, meter: ActivationMeter | None
    ) -> tuple[float | None, float]:
        """Run a batch; returns its loss, the same on every rank, and the seconds it took."""
        self.life.begin(train=batch.train, log=log)
        with self.together("agreeing on the step"):
            agree = self._agreement.begin(batch, meter)
        begun_s = time.perf_counter()
        self._carry_out(batch, agree, log=log, meter=meter)
        with self.together("sharing the loss"):
            loss = self.loss_of(self.world.total(self.loss_parts(batch)))
        self._let_go(batch)
        return loss, time.perf_counter() - begun_s

    def run_ahead(self, batch: Batch, *, follows: bool) -> None:
        """Run a training batch to the end of this rank's own part, waiting for no rank but where
        a message of it is needed; the loss is not shared.

        follows: whether the session ran ahead in the step before too; else all ranks agree first.
        """
        self.life.begin(train=batch.train, log=None)
        with self.together("agreeing on the step"):
            agree = (
                self._agreement.begin_to_hear(batch) if follows else self._agreement.begin(batch)
            )
        self._carry_out(batch, agree, log=None, meter=None)
        with self.together("letting go of what was sent"):
            self._let_go(batch)

    def _let_go(self, batch: Batch) -> None:
        """All messages have been taken, and both ends of each link have seen the same ones."""
        self._executors[batch.train].finish()
        if self._setup.static_shapes:
            self._agreement.learnt.commit()

    def _carry_out(
        self,
        batch: Batch,
        agree: Callable[[], Learnt],
        *,
        log: SpanLog | None,
        meter: ActivationMeter | None,
    ) -> None:
        """This rank's actions, to the gradients' last sums."""
        executor = self._executors[batch.train]
        try:
            if batch.train:
                self._begin_gradients(batch)
            with self.together(RUNNING), torch.set_grad_enabled(batch.train):
                self.life.executing = executor
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

    def _begin_gradients(self, batch: Batch) -> None:
        """From here on gradients are this step's alone."""
        with self.together("weighing the loss"):
            if self._setup.count_fn is not None and self._setup.holds(-1):
                self._weigh_loss(sum(batch.counts))
        self._sharded.begin()
        self._offloading.begin(batch)
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
        with self.together(REDUCING):
            if self.replicas is not None:
                self.replicas.finish()
        with self.together(TYING):
            for weight in self.tied:
                weight.reduce()

    def loss_parts(self, batch: Batch) -> list[float]:
        """This rank's part of what `loss_of` makes the loss of, to be summed over all ranks."""
        return [batch.losses.sum(), float(len(batch.losses)), float(sum(batch.counts))]

    def loss_of(self, totals: Sequence[float]) -> float | None:
        """The step's loss; None where no rank had one."""
        total, given, counted = totals
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
        """Let go of links and threads; other ranks cannot step any more either."""
        self.life.close()
        self._let_go_of_blocks()
        self._offloading.close()

    def together(self, phase: str) -> AbstractContextManager[None]:
        """If anything fails inside, every rank fails; see `Life.together`."""
        return self.life.together(phase)

    def _let_go_of_failed(self) -> None:
        for executor in self._executors.values():
            executor.reset()
        self._let_go_of_blocks()
        self._offloading.close()

    def _let_go_of_blocks(self) -> None:
        for runner in self._runners.values():
            if runner.recomputation is not None:
                runner.recomputation.close()


def _ranks_of(names: Mapping[int, str], schedule: Schedule) -> tuple[int, ...]:
    return tuple(sorted({schedule.placement.stage_to_rank[stage] for stage in names}))
