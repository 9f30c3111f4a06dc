"""`Pipeline`: train any list of modules through a pipeline, on any schedule.

    pipe = fullbore.Pipeline(stages={0: first, 2: third}, schedule=schedule, loss_fn=loss_fn)
    result = pipe.step(inputs, targets)
    pipe.clip_grad_norm(1.0)
    optimizer.step()

Every rank makes the pipeline and calls its methods in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from fullbore.errors import PipelineError, RankError
from fullbore.ir import Schedule
from fullbore.passes import forward_only, insert_communication
from fullbore.runtime.arguments import judge
from fullbore.runtime.device import side_of
from fullbore.runtime.executor import Batch
from fullbore.runtime.meeting import Patience, Said
from fullbore.runtime.microbatch import batch_size, split
from fullbore.runtime.norm import clip_grad_norm
from fullbore.runtime.recorder import (
    ActivationMeter,
    Clock,
    RankRecord,
    SpanLog,
    assemble,
    clock_offset_s,
)
from fullbore.runtime.session import Session, Setup
from fullbore.runtime.stage import LossFunction
from fullbore.runtime.watchdog import OnStall
from fullbore.runtime.wiring import Rendezvous, Wiring, pairs_of
from fullbore.timeline import Timeline
from fullbore.verify import links

__all__ = ["Pipeline", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step or evaluation gave.

    loss: mean over microbatches (their sum with reduction="sum"), the same on every rank; None
        where an evaluation had no targets.
    losses: one scalar tensor a microbatch where the last stage is, else None.
    outputs: one entry a microbatch where the last stage is, if asked for, else None.
    step_s: seconds from the ranks' agreement to begin until every rank had the loss.
    timeline: of all ranks, on every rank, with record=True.
    peak_activation_bytes: a rank each, with record=True: most bytes that autograd kept at once.
    stage_activation_bytes: a stage each, with record=True: most that it kept for one microbatch.
    boundary_messages: a rank each, with record=True: most receives posted at once so far.
    """

    loss: float | None
    losses: list[torch.Tensor] | None
    outputs: list[Any] | None
    step_s: float
    timeline: Timeline | None = None
    peak_activation_bytes: tuple[int, ...] | None = None
    stage_activation_bytes: tuple[int, ...] | None = None
    boundary_messages: tuple[int, ...] | None = None


class Pipeline:
    """One rank's part of a pipeline.

    stages: the modules of the stages that the schedule places on this rank. A stage is called
        with the previous stage's output: a tuple as several arguments, anything else as one.
    schedule: with or without sends and receives in place; verified before anything runs.
    loss_fn: called as loss_fn(output, target) for each microbatch on the last stage; returns a
        tensor with one element. Needed where the last stage is.
    group: the process group whose rank r is pipeline rank r; None: the default group, or no
        group at all for one rank.
    reduction: gradients are the "mean" over microbatches, or their "sum".
    tied: weights that several stages share, each {stage: parameter name, ...}; their copies are
        made equal now, and their gradients summed after each step.
    overlap_p2p: False makes each send block until it has left, for comparison.
    record: measure each step: timeline and activation bytes.
    static_shapes: False if outputs change their shapes while inputs do not.
    timeout_s: how long a rank waits for another before it gives up.
    stall_timeout_s: after how long without any movement one rank tells who waits for whom, and
        again when that has doubled; None: never.
    on_stall: is told, in a thread of its own; None: the log (`logging`, at level WARNING).
    flight_record: a folder that all ranks may write to. When a step fails each rank leaves there,
        under the number of the step, what it was doing; None: nothing is written.
    clock: seconds; a recorder's clock.

    Raises PipelineError on every rank if any rank's arguments are wrong, or if arguments that all
    must share differ (of the class of this rank's own objection where it has one: a schedule that
    breaks a law is a VerificationError); RankError if a rank does not come within timeout_s.

    step_number: of the next training step, counted from 1; whoever resumes a run may set it, so
    that messages name the run's steps.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        loss_fn: LossFunction | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        tied: Sequence[Mapping[int, str]] = (),
        overlap_p2p: bool = True,
        record: bool = False,
        static_shapes: bool = True,
        timeout_s: float = 1800.0,
        stall_timeout_s: float | None = None,
        on_stall: OnStall | None = None,
        flight_record: str | PathLike[str] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        rendezvous = _rendezvous(schedule, group, timedelta(seconds=timeout_s))
        self._records = None if flight_record is None else Path(flight_record)
        self._clock, self._life, self._closed = clock, 0, False
        self.record, self.step_number = record, 1
        patience = Patience(
            timeout_s=timeout_s, stall_s=stall_timeout_s, on_stall=on_stall or _log_stall
        )
        objection = judge(
            stages=stages,
            schedule=schedule,
            rank=rendezvous.rank,
            ranks=rendezvous.ranks,
            has_loss=loss_fn is not None,
            tied=tied,
            reduction=reduction,
            overlap=overlap_p2p,
            common={"values of static_shapes": static_shapes, "values of record": record},
        )
        objection.raise_together(rendezvous.meet(life=0, said=objection.said, patience=patience))
        programs = {True: insert_communication(schedule), False: forward_only(schedule)}
        self._setup = Setup(
            rendezvous=rendezvous,
            side=side_of(torch.device(device) if device else _device_of(stages)),
            stages=dict(stages),
            programs=programs,
            uses={train: links(p, rank=rendezvous.rank) for train, p in programs.items()},
            pairs=pairs_of(schedule),
            tied=[dict(names) for names in tied],
            loss_fn=loss_fn,
            mean=reduction == "mean",
            overlap=overlap_p2p,
            static_shapes=static_shapes,
            patience=patience,
        )
        self._session = self._begin_life()
        with self._session.together("starting"):
            for weight in self._session.tied:
                weight.equalize()
            self._offset_s = clock_offset_s(self._session.control, clock)

    # -- the public calls ----------------------------------------------------------------------

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> StepResult:
        """Forward and backward of M microbatches; adds to the parameters' .grad.

        inputs: where the first stage is; targets: where the last stage is (ignored elsewhere).
        A tensor is split along dimension 0, a list has one entry a microbatch, a tuple of them is
        several arguments. kwargs: for every stage of this rank, split likewise.
        return_outputs: keep the last stage's outputs, which are freed otherwise.

        Raises RankError on every rank if any rank fails; the pipeline can step again after it,
        but gradients of the failed step may have been added in part: zero them.
        """
        return self._run(inputs, targets, kwargs, train=True, return_outputs=return_outputs)

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> StepResult:
        """Forward only, with modules in eval mode; gradients are not touched.

        As `step`; targets may be missing, and the loss with them.
        """
        stages = self._setup.stages.values()
        modes = [(m, m.training) for module in stages for m in module.modules()]
        for module in stages:
            module.eval()
        try:
            return self._run(inputs, targets, kwargs, train=False, return_outputs=return_outputs)
        finally:
            for module, training in modes:
                module.training = training

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all ranks' gradients so that their 2-norm is at most max_norm; every rank calls.

        Returns the norm before clipping, the same on every rank. A tied weight counts once.
        """
        session = self._living_session()
        copies = {id(copy) for weight in session.tied for copy in weight.copies}
        owned = {id(weight.copies[0]) for weight in session.tied if weight.owner}
        parameters = list(
            {id(p): p for m in self._setup.stages.values() for p in m.parameters()}.values()
        )
        counted = [p for p in parameters if id(p) not in copies or id(p) in owned]
        with session.together("clip_grad_norm"):
            return clip_grad_norm(session.control, parameters, counted=counted, max_norm=max_norm)

    def total(self, values: Sequence[float]) -> list[float]:
        """The elementwise sums of some numbers over all ranks; every rank calls."""
        with self._living_session().together("adding up numbers of all ranks"):
            return self._session.control.total(values)

    def fail(self, *, rank: int, action: str | None, cause: str) -> RankError:
        """Fail the step that was just done, for a reason found in its result; every rank calls.

        rank, action, cause: the same everywhere. Leaves flight records; returns what to raise.
        """
        self.step_number -= 1
        self._session.step = self.step_number
        return self._session.give_up(rank=rank, action=action, cause=cause)

    def close(self) -> None:
        """Let go of links and threads; the pipeline cannot step any more, on any rank."""
        if not self._closed:
            self._closed = True
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- behind them -----------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank within the pipeline."""
        return self._setup.rendezvous.rank

    def _begin_life(self) -> Session:
        """Wire everything; raises RankError where that fails, on every rank that notices."""
        setup = self._setup
        try:
            wiring = Wiring(
                setup.rendezvous, life=self._life, side=setup.side, records=self._records
            )
            return Session(setup, wiring)
        except RuntimeError as error:
            raise RankError(
                rank=None, action="connecting", cause=f"a rank was lost ({error})"
            ) from error

    def _living_session(self) -> Session:
        """The session in use, or after a failure a new one: all ranks have failed, so all come."""
        if self._closed:
            raise PipelineError("the pipeline is closed: make another one")
        if self._session.failed:
            self._life += 1
            nothing = Said(objection=None, common={})
            self._setup.rendezvous.meet(
                life=self._life, said=nothing, patience=self._setup.patience
            )
            self._session = self._begin_life()
        self._session.step = self.step_number
        return self._session

    def _run(
        self,
        inputs: Any,
        targets: Any,
        kwargs: Mapping[str, Any] | None,
        *,
        train: bool,
        return_outputs: bool,
    ) -> StepResult:
        session = self._living_session()
        with session.together("preparing the batch"):
            batch = self._batch(inputs, targets, dict(kwargs or {}), train=train)
            batch.return_outputs = return_outputs
        log = SpanLog(self._clock) if self.record else None
        meter = self._meter(batch) if self.record else None
        loss, step_s = session.run(batch, log=log, meter=meter)
        records: list[RankRecord] | None = None
        if log is not None and meter is not None:
            with session.together("gathering the timeline"):
                records = session.control.gather(
                    log.record(
                        offset_s=self._offset_s,
                        meter=meter,
                        boundary_messages=session.boundary_messages,
                    )
                )
        self.step_number += train
        return self._result(batch, loss, step_s, records)

    def _meter(self, batch: Batch) -> ActivationMeter:
        return ActivationMeter(
            list(self._setup.stages.values()), [batch.inputs, batch.targets, batch.kwargs]
        )

    def _batch(self, inputs: Any, targets: Any, kwargs: dict[str, Any], *, train: bool) -> Batch:
        setup, m = self._setup, self._setup.schedule.microbatches
        if train and torch.is_inference_mode_enabled():
            raise PipelineError(
                "there are no gradients in torch.inference_mode: step outside of it"
            )
        first, last = setup.holds(0), setup.holds(-1)
        if first and inputs is None:
            raise PipelineError("inputs are missing on the rank of the first stage")
        if last and targets is None and train:
            raise PipelineError("targets are missing on the rank of the last stage")
        size = batch_size(inputs) if first else batch_size(targets) if last else None
        return Batch(
            inputs=split(inputs, m, what="inputs", size=size) if first else [None] * m,
            targets=split(targets, m, what="targets", size=size) if last else [None] * m,
            kwargs=split(kwargs, m, what="kwargs", size=size),
            signatures=[],
            train=train,
            return_outputs=False,
            rows=size,
        )

    def _result(
        self, batch: Batch, loss: float | None, step_s: float, records: list[RankRecord] | None
    ) -> StepResult:
        last = self._setup.holds(-1)
        microbatches = range(self._setup.schedule.microbatches)
        return StepResult(
            loss=loss,
            losses=[batch.losses[m] for m in microbatches] if last and batch.losses else None,
            outputs=[batch.outputs[m] for m in microbatches] if batch.outputs else None,
            step_s=step_s,
            timeline=assemble(records, name=self._setup.schedule.name) if records else None,
            peak_activation_bytes=tuple(r.peak_bytes for r in records) if records else None,
            stage_activation_bytes=_by_stage(records) if records else None,
            boundary_messages=tuple(r.boundary_messages for r in records) if records else None,
        )


def _rendezvous(
    schedule: Schedule, group: dist.ProcessGroup | None, timeout: timedelta
) -> Rendezvous:
    if group is None and not dist.is_initialized():
        if schedule.ranks > 1:
            raise PipelineError(
                f"the schedule has {schedule.ranks} ranks, but torch.distributed is not "
                "initialized: start the ranks with torchrun and call init_process_group first"
            )
        return Rendezvous(store=HashStore(), rank=0, ranks=1, timeout=timeout)
    return Rendezvous.of(group, timeout=timeout)


def _log_stall(words: str) -> None:
    logging.getLogger("fullbore.runtime").warning(words)


def _by_stage(records: list[RankRecord]) -> tuple[int, ...]:
    of_stage = {stage: size for record in records for stage, size in record.stage_bytes.items()}
    return tuple(size for _, size in sorted(of_stage.items()))


def _device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    parameters = (p for module in stages.values() for p in module.parameters())
    return next((p.device for p in parameters), torch.device("cpu"))
