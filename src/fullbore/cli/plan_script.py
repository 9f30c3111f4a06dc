"""What Megatron-LM's arguments say besides the model: it holds where nothing else was typed.

Flags that do not go together with something typed are passed over: stages of another number of
ranks, layers of another number of stages, modules of another recomputation or of other graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from fullbore.cli.plan_asked import Asked
from fullbore.cost.hardware import Capture
from fullbore.cost.model import CORE, Precision
from fullbore.cost.model.megatron import Given, given_by_flags
from fullbore.errors import ConfigError
from fullbore.plan.explain import Job
from fullbore.plan.explain.asked import optimizer_types
from fullbore.plan.explain.catalog import flag
from fullbore.plan.explain.job import Refused
from fullbore.plan.programs import family_of
from fullbore.plan.question import Borrowed

__all__ = ["Said", "said_by"]

_NUMBERS = {
    "global_batch": "global_batch_size",
    "sequence": "seq_length",
    "microbatch_size": "micro_batch_size",
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
}
_WHOLE = ("global_batch", "sequence", "expert_tensor")  # of which there is one value only
_SPLITS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
_TYPES = (
    "optimizer",
    "grad_reduce_in_bf16",
    "use_precision_aware_optimizer",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
)
# What says that a script starts a run, and what of a run Megatron-LM does only where it is told to.
_RUNS = ("micro_batch_size", "global_batch_size")
_BESIDE = {"overlap_gradients": "overlap_grad_reduce", "overlap_parameters": "overlap_param_gather"}
# Of the model, and `fullbore plan` has no option for it.
_UNTYPED = ("moe_expert_capacity_factor",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What was typed, with what a script says where nothing was.

    borrowed: the flags that were, as they are typed for `fullbore plan`. precision: with the
    optimizer's types. optimizer: its name. dropless: as in `Kernels`.
    """

    asked: Asked
    borrowed: Borrowed
    precision: Precision
    optimizer: str = "adam"
    dropless: bool = True


# A field of `Asked`, its value, and how that is typed.
_Value = tuple[str, object, str]


def said_by(job: Job, asked: Asked) -> Said:
    """Fill in what a script says; ConfigError that names a flag of it that means nothing."""
    given = given_by_flags(dict(job.flags))
    open_ = [one for one in _values(job, given, asked) if getattr(asked, one[0]) is None]
    filled = replace(asked, **{field: cast(Any, value) for field, value, _ in open_})
    types = tuple(" ".join((flag(n), *job.flags[n])) for n in _TYPES if job.has(n))
    untyped = [flag(name) for name in _UNTYPED if job.has(name)]
    return Said(
        asked=filled,
        borrowed=Borrowed(
            taken=(*(told for _, _, told in open_), *types, *untyped),
            optimizer=types,
            said=frozenset(told.partition(" ")[0] for _, _, told in _all(job, given, asked)),
        ),
        precision=optimizer_types(job, Precision.named(filled.precision or "bf16")),
        optimizer=job.word("optimizer") or "adam",
        dropless=given.dropless,
    )


def _all(job: Job, given: Given, asked: Asked) -> Iterator[_Value]:
    """As if nothing had been typed."""
    sizes = replace(asked, pipeline=None, virtual_stages=None, layers=None, schedule=None)
    again = replace(sizes, recompute=None, recompute_layers=None, recompute_modules=None)
    return _values(job, given, replace(again, graphs=None))


def _values(job: Job, given: Given, asked: Asked) -> Iterator[_Value]:
    for field, name in _NUMBERS.items():
        number = _number(job, name)
        if number is not None:
            yield field, number if field in _WHOLE else str(number), f"{flag(name)} {number}"
    if asked.pipeline in (None, str(job.pipeline)):
        yield from _stages(job, asked)
    if (asked.recompute, asked.recompute_layers, asked.recompute_modules) == (None, None, None):
        yield from _recompute(given)
    if given.precision is not None:
        yield "precision", given.precision, f"--precision {given.precision}"
    if given.flash is not None:
        yield "flash", given.flash, "--use-flash-attn" if given.flash else "--no-flash-attn"
    if given.dispatcher is not None:
        yield "dispatcher", given.dispatcher, f"--moe-token-dispatcher-type {given.dispatcher}"
    if asked.graphs is None:
        yield from _graphs(job)
    yield from _switches(job)


def _number(job: Job, name: str) -> int | None:
    if not job.has(name):
        return None
    number = job.number(name)
    if number is None:
        words = " ".join(job.flags[name])[:60] or "without a value"
        raise ConfigError(f"{flag(name)} {words}: it must be a whole number, 1 or more")
    return number


def _stages(job: Job, asked: Asked) -> Iterator[_Value]:
    """Virtual stages, groups and uneven layers, which go with a number of ranks and a schedule."""
    families = [family_of(name) for name in (asked.schedule or "").split(",") if name]
    group = _number(job, _GROUP)
    if group is not None and (not families or any(one.takes_group for one in families)):
        yield "group", str(group), f"{flag(_GROUP)} {group}"
    if asked.layers is not None or not any(job.has(name) for name in (*_CHUNKS, *_SPLITS)):
        return
    v, layers = job.virtual_stages, job.stage_layers
    if isinstance(v, Refused):
        raise ConfigError(v.message)
    if isinstance(layers, Refused):
        raise ConfigError(layers.message)
    if families and not any(
        f.takes_virtual_stages or f.default_virtual_stages == v for f in families
    ):
        return
    if any(job.has(name) for name in (*_CHUNKS, _SPLITS[0])):
        yield "virtual_stages", str(v), f"--num-virtual-stages-per-pipeline-rank {v}"
    if asked.virtual_stages in (None, str(v)) and any(job.has(name) for name in _SPLITS):
        told = ",".join(map(str, layers))
        yield "layers", told, f"--stage-layers {told}"


def _recompute(given: Given) -> Iterator[_Value]:
    again = given.recompute
    if again is None:
        return
    yield "recompute", again.granularity, f"--recompute-granularity {again.granularity}"
    if again.layers is not None:
        yield "recompute_layers", again.layers, f"--recompute-num-layers {again.layers}"
    if again.modules != CORE:
        told = ",".join(again.modules)
        yield "recompute_modules", told, f"--recompute-modules {told}"


def _graphs(job: Job) -> Iterator[_Value]:
    capture = Capture.of_flags(job.flags)
    if capture.is_off:
        return
    yield "graphs", capture.implementation, f"--cuda-graph-impl {capture.implementation}"
    if capture.modules:
        told = ",".join(capture.modules)
        yield "graph_modules", told, f"--cuda-graph-modules {told}"


def _switches(job: Job) -> Iterator[_Value]:
    if job.has("sequence_parallel"):
        yield "sequence_parallel", True, "--sequence-parallel"
    if job.distributed:
        yield "distributed", True, "--use-distributed-optimizer"
    if job.has("no_overlap_p2p_communication"):
        yield "overlap_messages", False, "--no-overlap-p2p-communication"
    yield from _overlaps(job)
    if job.has("tp_comm_overlap"):
        yield "overlap_tensor", True, "--tp-comm-overlap"
    if job.has("overlap_moe_expert_parallel_comm"):
        yield "overlap_experts", True, "--overlap-moe-expert-parallel-comm"


def _overlaps(job: Job) -> Iterator[_Value]:
    """Beside the passes where the script says so, after them where it says nothing, as it would be.

    A file with nothing but a model leaves it open.
    """
    if not any(job.has(name) for name in _RUNS):
        return
    for field, name in _BESIDE.items():
        is_there = job.has(name)
        yield field, is_there, flag(name if is_there else f"no_{name}")
