"""From flags that are legal to the planner's question and the one choice that they make."""

from __future__ import annotations

from dataclasses import replace

from fullbore.cost.hardware import Capture, Overlap
from fullbore.cost.model import Kernels, Precision, Recompute
from fullbore.cost.model.legal import has_module
from fullbore.plan.choice import NONE, Choice, Spread
from fullbore.plan.engines import engine_of
from fullbore.plan.explain.job import Job, Refused
from fullbore.plan.question import Fixed, Question

__all__ = ["capture_of", "choice_of", "optimizer_types", "precision_of", "question_of"]

_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def question_of(job: Job, *, memory_limit_bytes: float | None = None) -> Question:
    """What the planner is asked; ConfigError where the device has no such precision.

    Messages between stages overlap under interleaving only: plain 1F1B in Megatron-LM waits.
    """
    shape, given, sequences = job.shape, job.given, job.sequences
    assert not isinstance(shape, Refused) and not isinstance(given, Refused)
    assert sequences is not None
    return Question(
        shape=shape,
        cluster=job.cluster,
        global_batch=sequences,
        sequence=job.size("seq_length"),
        precision=precision_of(job),
        kernels=Kernels(
            flash=given.flash is not False,
            dispatcher=given.dispatcher or "alltoall",
            dropless=given.dropless,
        ),
        fixed=Fixed(engines=(engine_of("megatron"),)),
        overlap=Overlap(
            forward=job.has("tp_comm_overlap"),
            expert=job.has("overlap_moe_expert_parallel_comm"),
        ),
        capture=capture_of(job),
        memory_limit_bytes=memory_limit_bytes,
        overlap_messages=job.interleaved and not job.has("no_overlap_p2p_communication"),
        overlap_gradients=job.has("overlap_grad_reduce"),
        overlap_parameters=job.has("overlap_param_gather"),
        optimizer=job.word("optimizer") or "adam",
    )


def capture_of(job: Job) -> Capture:
    """What CUDA graphs replay; ConfigError where flags say nothing that there is.

    A --cuda-graph-impl that is no choice of Megatron's is refused elsewhere, and left out here.
    """
    known = job.word("cuda_graph_impl") is not None
    return Capture.of_flags(
        {name: words for name, words in job.flags.items() if known or name != "cuda_graph_impl"}
    )


def precision_of(job: Job) -> Precision:
    """Megatron's fp32 where no other is named; with the optimizer's own types."""
    given = job.given
    name = None if isinstance(given, Refused) else given.precision
    return optimizer_types(job, Precision.named(name or "fp32"))


def optimizer_types(job: Job, made: Precision) -> Precision:
    """A precision with the types of gradients and of the optimizer's states that flags name.

    SGD has the first moment alone; Muon is taken to have Adam's two.
    """
    only_one = job.word("optimizer") == "sgd"
    if only_one:
        made = replace(made, moments=made.moments / 2)
    if job.has("grad_reduce_in_bf16"):
        made = replace(made, gradient=2.0)
    if not job.has("use_precision_aware_optimizer"):
        return made
    first, second = (job.word(f"exp_avg{part}_dtype") or "fp32" for part in ("", "_sq"))
    gradient, main = job.word("main_grads_dtype"), job.word("main_params_dtype")
    return replace(
        made,
        gradient=made.gradient if gradient is None else _BYTES[gradient],
        main_weight=made.main_weight if main is None else _BYTES[main],
        moments=_BYTES[first] + (0.0 if only_one else _BYTES[second]),
    )


def choice_of(job: Job) -> Choice:
    """What the flags of a legal job choose."""
    layers, pipeline = job.stage_layers, job.schedule
    assert isinstance(layers, tuple) and pipeline is not None and not isinstance(pipeline, Refused)
    spread = Spread(
        pipeline=job.pipeline,
        tensor=job.tensor,
        context=job.context,
        expert=job.expert,
        data=job.data,
        microbatch_size=job.size("micro_batch_size"),
        microbatches=pipeline.microbatches,
        sequence_parallel=job.sequence_parallel,
        distributed=job.distributed,
        expert_tensor=job.split.expert_tensor,
    )
    group = (pipeline.group_size or job.pipeline) if job.interleaved else None
    return Choice(
        spread=spread,
        schedule=pipeline.schedule,
        virtual_stages=pipeline.virtual_stages,
        group=group,
        recompute=_recompute(job),
        layers=layers,
    )


def _recompute(job: Job) -> Recompute:
    """Without modules of which the model has none: Megatron-LM passes over them."""
    given, shape = job.given, job.shape
    assert not isinstance(given, Refused) and not isinstance(shape, Refused)
    again = given.recompute or NONE
    there = tuple(module for module in again.modules if has_module(shape, module))
    return replace(again, modules=there) if there else NONE
