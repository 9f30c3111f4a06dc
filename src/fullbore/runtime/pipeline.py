"""`Pipeline`: train any list of modules through a pipeline, on any schedule.

    pipe = fullbore.Pipeline(stages={0: first, 2: third}, schedule=schedule, loss_fn=loss_fn)
    result = pipe.step(inputs, targets)
    pipe.clip_grad_norm(1.0)
    optimizer.step()

Every rank makes the pipeline and calls its methods in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from fullbore.errors import PipelineError, RankError
from fullbore.ir import Schedule
from fullbore.passes import forward_only, insert_communication
from fullbore.runtime.ahead import Ahead
from fullbore.runtime.arguments import Arguments, judge, patience_of, rendezvous_of
from fullbore.runtime.batch import Batch
from fullbore.runtime.batching import make_batch
from fullbore.runtime.device import device_of, side_of
from fullbore.runtime.main_grad import MainGradients
from fullbore.runtime.meeting import Said
from fullbore.runtime.norm import clip_grad_norm, counted_here
from fullbore.runtime.recompute import Recompute
from fullbore.runtime.recorder import ActivationMeter, RankRecord, SpanLog, clock_offset_s
from fullbore.runtime.result import StepResult, make_result
from fullbore.runtime.session import Session
from fullbore.runtime.setup import Setup
from fullbore.runtime.split import SplitReport
from fullbore.runtime.stage import CountFunction, LossFunction
from fullbore.runtime.stamps import Clock, stamps_for
from fullbore.runtime.watchdog import OnStall
from fullbore.runtime.wiring import pairs_of
from fullbore.verify import links

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Pipeline"]


class Pipeline:
    """One rank's part of a pipeline.

    stages: the modules of the stages that the schedule places on this rank. A stage is called
        with the previous stage's output: a tuple as several arguments, anything else as one. Where
        the schedule cuts sequences into slices, it is called for each with `carry`, () or what it
        returned for the slice before, and returns the pair (output, carry); see docs/slices.md.
    schedule: with or without sends and receives in place; verified before anything runs.
    loss_fn: called as loss_fn(output, target) for each microbatch on the last stage; returns a
        tensor with one element. Needed where the last stage is.
    group: the process group whose rank r is pipeline rank r; None: the default group, or no
        group at all for one rank.
    mesh: instead of a group, a device mesh with the dimensions "pp" and "dp", in any order: D
        replicas of a pipeline of P ranks, each with rows of its own. Weights and buffers of all
        replicas are made equal now, and what a step adds to the gradients is summed over them.
    reduction: gradients are the "mean" over the microbatches of all replicas, or their "sum".
    count_fn: called as count_fn(target) for each microbatch where the last stage is; with it
        loss_fn returns a sum over what it counts (tokens that are not ignored, say), and the
        step's loss is that sum over the batch of all replicas divided by the total count.
    reduce_dtype: in which gradients are summed over replicas; None: in their own.
    tied: weights that several stages share, each {stage: parameter name, ...}; their copies are
        made equal now, and their gradients summed after each step.
    overlap_p2p: False makes each send block until it has left, for comparison.
    record: measure each step: timeline and activation bytes.
    static_shapes: False if outputs change their shapes while inputs do not.
    main_grad_dtype: such as torch.float32, for weights in bfloat16: gradients accumulate in it, in
        each weight's `main_grad`, and .grad stays None; set main_grad to None after stepping.
    recompute: which activations are dropped after a forward and made again for the backward:
        "none", those of each "full" stage, of the stages where the schedule has "placed" an R, or
        of the first N blocks of each stage, one at a time. A stage has blocks if it is a Sequential
        or has one ModuleList; else it goes in full. A stage of fewer than N goes block by block.
    offload_folder: where the file lies to which activations go on CPU where the schedule has an
        OFFLOAD, without a name; None: the system's folder for temporary files.
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
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        count_fn: CountFunction | None = None,
        reduce_dtype: torch.dtype | None = None,
        tied: Sequence[Mapping[int, str]] = (),
        overlap_p2p: bool = True,
        record: bool = False,
        static_shapes: bool = True,
        main_grad_dtype: torch.dtype | None = None,
        recompute: Recompute = "none",
        offload_folder: str | PathLike[str] | None = None,
        timeout_s: float = 1800.0,
        stall_timeout_s: float | None = None,
        on_stall: OnStall | None = None,
        flight_record: str | PathLike[str] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        given = locals()
        patience = patience_of(timeout_s, stall_timeout_s, on_stall)
        timeout = timedelta(seconds=patience.timeout_s)
        rendezvous = rendezvous_of(schedule, group, mesh, timeout)
        judgement = judge(Arguments(values=given, rendezvous=rendezvous))
        judgement.raise_together(rendezvous.meet(life=0, said=judgement.said, patience=patience))
        programs = {True: insert_communication(schedule), False: forward_only(schedule)}
        self._setup = Setup(
            rendezvous=rendezvous,
            side=side_of(torch.device(device) if device else device_of(stages)),
            stages=dict(stages),
            programs=programs,
            uses={train: links(p, rank=rendezvous.rank) for train, p in programs.items()},
            pairs=pairs_of(schedule),
            tied=[dict(names) for names in tied],
            loss_fn=loss_fn,
            mean=reduction == "mean",
            overlap=overlap_p2p,
            static_shapes=static_shapes,
            main_grad_dtype=main_grad_dtype,
            recompute=recompute,
            offload_folder=None if offload_folder is None else Path(offload_folder),
            count_fn=count_fn,
            reduce_dtype=reduce_dtype,
            patience=patience,
            records=None if flight_record is None else Path(flight_record),
        )
        self.record, self.step_number = record, 1
        self._meter = ActivationMeter(
            list(stages.values()), microbatches=schedule.microbatches, slices=schedule.slices
        )
        self._clock, self._life, self._closed = clock, 0, False
        self._main_gradients = None
        if main_grad_dtype is not None:
            self._main_gradients = MainGradients(main_grad_dtype)
            self._main_gradients.keep_for(self.weights())
        self._session = self._begin_life()
        with self._session.together("starting"):
            self._session.equalize()
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
        several arguments. kwargs: for every stage of this rank, split likewise. Where sequences
        are cut into slices, tensors are along dimension 1 too, and a list has one entry a slice.
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

        Returns the norm before clipping, the same on every rank. A tied weight counts once, and
        so do the replicas' copies of a weight.
        """
        session, parameters = self._living_session(), self.weights()
        counted = counted_here(parameters, session.tied, is_first_replica=self.replica == 0)
        with session.together("clip_grad_norm"):
            return clip_grad_norm(session.world, parameters, counted=counted, max_norm=max_norm)

    def run_ahead(
        self,
        inputs: Any,
        targets: Any,
        kwargs: Mapping[str, Any] | None = None,
        *,
        follows: bool,
    ) -> Ahead:
        """A step of which no rank waits for all others; see `PostValidatedOptimizer`.

        follows: whether it comes right after another such step; else all ranks agree first.
        """
        session = self._living_session()
        with session.together("preparing the batch"):
            batch = self._batch(inputs, targets, kwargs, train=True)
        session.run_ahead(batch, follows=follows)
        self.step_number += 1
        return Ahead(session, batch, self.weights(), is_first_replica=self.replica == 0)

    def spread(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        """Give replicas the values that others of them hold, as ZeRO-1 does after its step.

        tensors: of each replica [D], those whose values it has; filled on the others. Every rank
        calls, and its replicas with tensors of the same shapes and types.
        """
        session = self._living_session()
        with session.together("giving weights to the other replicas"):
            if session.replicas is not None:
                session.replicas.spread(tensors)

    def total(self, values: Sequence[float]) -> list[float]:
        """The elementwise sums of some numbers over all ranks; every rank calls."""
        session = self._living_session()
        with session.together("adding up numbers of all ranks"):
            return session.world.total(values)

    def fail(self, *, step: int, rank: int | None, action: str | None, cause: str) -> RankError:
        """Fail a step that was done, for a reason found in its result; every rank calls.

        step, rank (by their numbers), action, cause: the same everywhere. Leaves flight records;
        returns what to raise.
        """
        self.step_number = self._session.life.step = step
        return self._session.life.give_up(rank=rank, action=action, cause=cause)

    def split_report(self) -> tuple[SplitReport, ...]:
        """For each stage here whose backward is split: which weights wait for W, which go with I.

        Known after the second step; before it, everything seems to go with I.
        """
        return self._session.split_report()

    def close(self) -> None:
        """Let go of links and threads; the pipeline cannot step any more, on any rank."""
        if self._closed:
            return
        self._closed = True
        if self._main_gradients is not None:
            self._main_gradients.close()
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

    def weights(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        stages = self._setup.stages.values()
        return list({id(p): p for module in stages for p in module.parameters()}.values())

    def modules(self) -> list[nn.Module]:
        """This rank's stages and all within them, each once."""
        stages = self._setup.stages.values()
        return list(dict.fromkeys(part for module in stages for part in module.modules()))

    @property
    def device(self) -> torch.device:
        """Where this rank's stages are."""
        return self._setup.side.device

    @property
    def rank(self) -> int:
        """This rank within its pipeline."""
        return self._setup.rendezvous.rank

    @property
    def replica(self) -> int:
        """Which replica of the pipeline this rank belongs to; 0 without a mesh."""
        return self._setup.rendezvous.replica

    def _begin_life(self) -> Session:
        """Wire everything; raises RankError where that fails, on every rank that notices."""
        try:
            return Session(self._setup, number=self._life)
        except RuntimeError as error:
            raise RankError(
                rank=None, action="connecting", cause=f"a rank was lost ({error})"
            ) from error

    def _living_session(self) -> Session:
        """The session in use, or after a failure a new one: all ranks have failed, so all come."""
        if self._closed:
            raise PipelineError("the pipeline is closed: make another one")
        if self._session.life.failed:
            self._life += 1
            self._meter.forget()
            nothing = Said(objection=None, common={})
            self._setup.rendezvous.meet(
                life=self._life, said=nothing, patience=self._setup.patience
            )
            self._session = self._begin_life()
        self._session.life.step = self.step_number
        return self._session

    def _batch(
        self, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None, *, train: bool
    ) -> Batch:
        if train and self._main_gradients is not None:
            self._main_gradients.keep_for(self.weights())  # of which some may be trained only now
        return make_batch(self._setup, inputs, targets, kwargs, train=train)

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
            batch = self._batch(inputs, targets, kwargs, train=train)
            batch.return_outputs = return_outputs
        log = SpanLog(stamps_for(self._setup.side.device, self._clock)) if self.record else None
        meter = self._meter if self.record else None
        if meter is not None:
            meter.begin([batch.inputs, batch.targets, batch.kwargs])
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
        return make_result(
            batch,
            loss=loss,
            step_s=step_s,
            records=records,
            schedule=self._setup.schedule,
            has_last=self._setup.holds(-1),
        )
