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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from fullbore.errors import PipelineError
from fullbore.ir import Schedule
from fullbore.passes import forward_only, insert_communication
from fullbore.runtime.ahead import Ahead
from fullbore.runtime.arguments import agree_on_arguments, meet
from fullbore.runtime.batch import Batch
from fullbore.runtime.device import side_of
from fullbore.runtime.main_grad import MainGradients
from fullbore.runtime.microbatch import batch_size, split
from fullbore.runtime.norm import clip_grad_norm, counted_here
from fullbore.runtime.recompute import Recompute
from fullbore.runtime.recorder import (
    ActivationMeter,
    RankRecord,
    SpanLog,
    clock_offset_s,
)
from fullbore.runtime.result import StepResult, make_result
from fullbore.runtime.session import Session, Setup
from fullbore.runtime.split import SplitReport
from fullbore.runtime.stage import CountFunction, LossFunction
from fullbore.runtime.stamps import Clock, stamps_for
from fullbore.runtime.wiring import Wiring, pairs_of
from fullbore.verify import check, links

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Pipeline"]


class Pipeline:
    """One rank's part of a pipeline.

    stages: the modules of the stages that the schedule places on this rank. A stage is called
        with the previous stage's output: a tuple as several arguments, anything else as one.
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
        "none", those of each "full" stage, or of the first N blocks of each stage, one block at a
        time. A stage has blocks if it is a Sequential or has one ModuleList; else it goes in full.
    timeout_s: how long a rank waits for another before it gives up.
    clock: seconds; a recorder's clock.

    Raises PipelineError on every rank if any rank's stages, loss_fn or tied names are wrong, or
    if arguments that all must share differ; a schedule that breaks a law (VerificationError) or
    does not fit the group is refused before the ranks meet, by each rank that was given it.
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
        timeout_s: float = 1800.0,
        clock: Clock = time.perf_counter,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise PipelineError(f'reduction is "mean" or "sum", not {reduction!r}')
        if count_fn is not None and reduction != "mean":
            raise PipelineError('count_fn says what the loss is a mean of: use reduction="mean"')
        if mesh is not None and group is not None:
            raise PipelineError("group and mesh say the same twice: give one of them")
        check(schedule, blocking_sends=not overlap_p2p)
        programs = {True: insert_communication(schedule), False: forward_only(schedule)}
        rendezvous = meet(schedule, group, mesh, timedelta(seconds=timeout_s))
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
            main_grad_dtype=main_grad_dtype,
            recompute=recompute,
            count_fn=count_fn,
            reduce_dtype=reduce_dtype,
        )
        self.record = record
        self._meter = ActivationMeter(list(stages.values()), microbatches=schedule.microbatches)
        self._clock, self._life, self._closed = clock, 0, False
        wiring = self._wire()
        agree_on_arguments(wiring, self._setup, record=record)
        self._main_gradients = None
        if main_grad_dtype is not None:
            self._main_gradients = MainGradients(self.weights(), main_grad_dtype)
        self._session = Session(self._setup, wiring)
        if self._session.replicas is not None:
            with self._session.together("making replicas equal"):
                self._session.replicas.equalize()
        for weight in self._session.tied:
            weight.equalize()
        self._offset_s = clock_offset_s(wiring.control, clock)

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
            batch = self._batch(inputs, targets, dict(kwargs or {}), train=True)
        session.run_ahead(batch, follows=follows)
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

    def split_report(self) -> tuple[SplitReport, ...]:
        """For each stage here whose backward is split: which weights wait for W, which go with I.

        Known after the second step; before it, everything seems to go with I.
        """
        return self._session.split_report()

    def close(self) -> None:
        """Let go of links and threads; the pipeline cannot step any more."""
        if self._main_gradients is not None and not self._closed:
            self._main_gradients.close()
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

    def weights(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        stages = self._setup.stages.values()
        return list({id(p): p for module in stages for p in module.parameters()}.values())

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of this rank's stages, each once."""
        stages = self._setup.stages.values()
        return list({id(b): b for module in stages for b in module.buffers()}.values())

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

    def _wire(self) -> Wiring:
        return Wiring(self._setup.rendezvous, life=self._life, side=self._setup.side)

    def _living_session(self) -> Session:
        """The session in use, or after a failure a new one: all ranks have failed, so all come."""
        if self._closed:
            raise PipelineError("the pipeline is closed: make another one")
        if self._session.failed:
            self._life += 1
            self._meter.forget()
            self._session = Session(self._setup, self._wire())
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
        return make_result(
            batch,
            loss=loss,
            step_s=step_s,
            records=records,
            schedule=self._setup.schedule,
            has_last=self._setup.holds(-1),
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
        parts = split(inputs, m, what="inputs", size=size) if first else [None] * m
        labels = split(targets, m, what="targets", size=size) if last else [None] * m
        return Batch(
            inputs=parts,
            targets=labels,
            counts=_count(labels, setup.count_fn) if last and targets is not None else [],
            kwargs=split(kwargs, m, what="kwargs", size=size),
            signatures=[],
            train=train,
            return_outputs=False,
            rows=size,
        )


def _count(labels: Sequence[Any], count_fn: CountFunction | None) -> list[float]:
    return [] if count_fn is None else [float(count_fn(target)) for target in labels]


def _device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    parameters = (p for module in stages.values() for p in module.parameters())
    return next((p.device for p in parameters), torch.device("cpu"))
