"""Rules about stages: how layers are shared out, how they interleave, and what is recomputed.

Source: Megatron-LM, `megatron/training/arguments.py`; Megatron Core,
`pipeline_parallel/schedules.py`, `transformer/transformer_config.py`, `model_parallel_config.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullbore.plan.explain.catalog import flag
from fullbore.plan.explain.job import Job, Refused

__all__ = ["STAGE_RULES"]

_LAYOUT = "pipeline_model_parallel_layout"
_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")

_MODULES = {
    "core_attn": (),
    "layernorm": (),
    "mlp": (),
    "moe": (),
    "moe_act": ("moe_grouped_gemm",),
    "shared_experts": ("moe_shared_expert_intermediate_size",),
    "mla_up_proj": ("multi_latent_attention",),
}  # what may be recomputed by itself, and the flags that it needs


def _said_twice(job: Job) -> Iterator[str]:
    """What says the stages, more than once."""
    if job.has(_LAYOUT):
        others = [name for name in (_PER_CHUNK, _CHUNKS, _FIRST, _LAST, *_ENDS) if job.has(name)]
        if others:
            yield f"{flag(_LAYOUT)} says all about stages: {_listed(others)} cannot stand beside it"
        return
    uneven = [name for name in (_FIRST, _LAST) if job.has(name)]
    ends = [name for name in _ENDS if job.has(name)]
    if uneven and ends:
        yield f"{_listed(uneven)} and {_listed(ends)} say the same twice"
    if uneven and job.has(_PER_CHUNK):
        yield f"{flag(_PER_CHUNK)} with {_listed(uneven)}: say {flag(_CHUNKS)} instead"


def _listed(names: list[str]) -> str:
    return " and ".join(map(flag, names))


def _layers(job: Job) -> Iterator[str]:
    if job.number("num_layers") is None:
        return  # said by another rule
    refused = [
        made.message for made in (job.virtual_stages, job.stage_layers) if isinstance(made, Refused)
    ]
    yield from dict.fromkeys(refused)


def _interleaved(job: Job) -> Iterator[str]:
    if not job.interleaved:
        if job.has("overlap_p2p_communication_warmup_flush"):
            yield (
                "--overlap-p2p-communication-warmup-flush needs interleaving "
                f"({flag(_CHUNKS)} 2 or more): plain 1F1B overlaps no messages"
            )
        if job.has("overlap_param_gather_with_optimizer_step"):
            yield (
                "--overlap-param-gather-with-optimizer-step needs interleaving "
                f"({flag(_CHUNKS)} 2 or more)"
            )
        return
    if job.pipeline == 1:
        yield f"{_said(job)} interleaves --pipeline-model-parallel-size 1: it takes 2 or more"
    elif job.pipeline == 2 and job.has("no_overlap_p2p_communication"):
        yield (
            f"{_said(job)} with --no-overlap-p2p-communication takes "
            "--pipeline-model-parallel-size 3 or more: two ranks would meet twice in one exchange"
        )
    if job.has("overlap_p2p_communication_warmup_flush") and job.has(
        "no_overlap_p2p_communication"
    ):
        yield (
            "--overlap-p2p-communication-warmup-flush and --no-overlap-p2p-communication exclude "
            "each other"
        )


def _said(job: Job) -> str:
    return next(flag(name) for name in (_LAYOUT, _PER_CHUNK, _CHUNKS) if job.has(name))


def _groups(job: Job) -> Iterator[str]:
    if job.is_whole and job.pipeline > 1 and isinstance(job.schedule, Refused):
        # Megatron-LM has no flag that names a schedule.
        yield job.schedule.message.partition(", or choose --schedule")[0]


def _offload(job: Job) -> Iterator[str]:
    number, layers = job.number("cpu_offloading_num_layers"), job.number("num_layers")
    if number is None or not job.has("cpu_offloading_num_layers"):
        return
    if job.pipeline > 1:
        yield (
            f"--cpu-offloading-num-layers with --pipeline-model-parallel-size {job.pipeline}: "
            "layers are offloaded where there is no pipeline only"
        )
    if layers is not None and number >= layers:
        yield f"--cpu-offloading-num-layers {number}: it must be less than --num-layers {layers}"


def _recompute_full(job: Job) -> Iterator[str]:
    if job.granularity != "full":
        return
    if not job.has("recompute_method"):
        yield "--recompute-granularity full needs --recompute-method uniform or block"
    if not job.has("recompute_num_layers"):
        yield "--recompute-granularity full needs --recompute-num-layers, 1 or more"


def _recompute_selective(job: Job) -> Iterator[str]:
    if job.granularity != "selective":
        return
    said = "activations" if job.has("recompute_activations") else "granularity selective"
    for name in ("recompute_method", "recompute_num_layers"):
        if job.has(name):
            yield f"--recompute-{said} with {flag(name)}: that is for full recomputation only"
    for module in job.flags.get("recompute_modules", ()):
        if module not in _MODULES:
            yield f"--recompute-modules {module}: it must be of {', '.join(_MODULES)}"
        elif needed := [name for name in _MODULES.get(module, ()) if not job.has(name)]:
            yield f"--recompute-modules {module} needs {_listed(needed)}"


def _distributed_activations(job: Job) -> Iterator[str]:
    if not job.has("distribute_saved_activations"):
        return
    if job.tensor == 1:
        yield "--distribute-saved-activations needs --tensor-model-parallel-size 2 or more"
    if job.granularity != "full":
        yield "--distribute-saved-activations needs --recompute-granularity full"
    if job.sequence_parallel:
        yield "--distribute-saved-activations and --sequence-parallel exclude each other"


STAGE_RULES = (
    _said_twice,
    _layers,
    _interleaved,
    _groups,
    _offload,
    _recompute_full,
    _recompute_selective,
    _distributed_activations,
)
