"""What could be changed about legal flags without training something else: one flag at a time.

The model, the batch and the precision stay. Sizes of groups go half and twice, the rest of the
devices goes to replicas; virtual stages, groups, recomputation and switches take all their values.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullbore.cost.model import CORE, RECOMPUTE_MODULES
from fullbore.cost.model.legal import has_module
from fullbore.cost.model.shape import Mlp
from fullbore.plan.emit import layout
from fullbore.plan.explain.edit import Edit, setting, without
from fullbore.plan.explain.job import Job, Refused

__all__ = ["by_cost", "moves"]

_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
_LAYOUT = "pipeline_model_parallel_layout"
_OTHER_SPLITS = (
    _PER_CHUNK,
    _CHUNKS,
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "distribute_saved_activations",
)
_CHEAP = frozenset({"layernorm", "mla_up_proj", "moe_act"})  # only outputs are let go
_MOST_VIRTUAL_STAGES = 8
_MOST_BLOCKS = 16


def moves(job: Job) -> Iterator[Edit]:
    """Changes of a job whose flags are legal; many of them are not."""
    yield from _sizes(job)
    yield from _virtual_stages(job)
    yield from _groups(job)
    yield from _recompute(job)
    yield from _switches(job)


def _sizes(job: Job) -> Iterator[Edit]:
    names = ["micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"]
    if job.context > 1:
        names.append("context_parallel_size")
    if job.has("num_experts"):
        names.append("expert_model_parallel_size")
    for name in names:
        size = job.size(name)
        for other in (size // 2, size * 2):
            if other >= 1:
                yield _sized(job, name, other)


def _sized(job: Job, name: str, size: int) -> Edit:
    """Experts and tensors of one size may have to share: what the flags leave open stays so."""
    made = setting(name, size)
    if name == "tensor_model_parallel_size" and size == 1 and job.has("tp_comm_overlap"):
        made = made + without("tp_comm_overlap")
    return made


def _virtual_stages(job: Job) -> Iterator[Edit]:
    if job.pipeline == 1 or job.has(_LAYOUT):
        return
    layers = job.size("num_layers") + sum(job.ends)
    now = job.virtual_stages
    for v in range(1, min(_MOST_VIRTUAL_STAGES, layers // job.pipeline) + 1):
        if v == now:
            continue
        if not job.has(_PER_CHUNK):
            yield setting(_CHUNKS, v) if v > 1 else without(_CHUNKS, _GROUP)
        elif layers % (job.pipeline * v) == 0:
            told = setting(_PER_CHUNK, layers // job.pipeline // v)
            yield told if v > 1 else without(_PER_CHUNK, _GROUP)


def _groups(job: Job) -> Iterator[Edit]:
    if not job.interleaved:
        return
    now = job.number(_GROUP) or job.pipeline
    for group in (job.pipeline, 2 * job.pipeline, 4 * job.pipeline):
        if group != now:
            yield setting(_GROUP, group)


def _recompute(job: Job) -> Iterator[Edit]:
    now = job.granularity
    nothing = without(*(name for name in _RECOMPUTE if name in job.flags))
    if now is not None:
        yield nothing
    selective = nothing + setting("recompute_granularity", "selective")
    for modules in _modules(job):
        # The core of attention is what is made again where nothing is said.
        named = Edit(changes=()) if modules == CORE else setting("recompute_modules", *modules)
        if now != "selective":
            yield selective + named
        elif set(modules) != set(job.recompute_modules):
            yield named if named.changes else without("recompute_modules")
    method, number = job.word("recompute_method"), job.number("recompute_num_layers")
    full = nothing + setting("recompute_granularity", "full")
    if now != "full" or method == "block":
        yield full + setting("recompute_method", "uniform") + setting("recompute_num_layers", 1)
    for layers in _blocks(job):
        if now != "full" or method != "block" or layers != number:
            told = setting("recompute_method", "block") + setting("recompute_num_layers", layers)
            yield full + told


def _modules(job: Job) -> Iterator[tuple[str, ...]]:
    """What could be made again by itself: each module, norms with each other, all cheap ones."""
    shape = job.shape
    if isinstance(shape, Refused):
        return
    dense = any(isinstance(layer.mlp, Mlp) for layer in shape.layers)
    there = [
        module
        for module in RECOMPUTE_MODULES[1:]
        if has_module(shape, module)
        and (module != "mlp" or dense)
        and (module != "moe_act" or job.has("moe_grouped_gemm"))
    ]
    cheap = tuple(module for module in there if module in _CHEAP)
    yield CORE
    yield from dict.fromkeys(
        (*((module,) for module in there), *(("layernorm", m) for m in there[1:]), cheap)
    )


def _blocks(job: Job) -> list[int]:
    """Numbers of layers that a stage could recompute, fewer than all."""
    most = max(job.stage_layers) if isinstance(job.stage_layers, tuple) else 1
    step = -(-most // _MOST_BLOCKS)
    return list(range(1, most, step))


def _switches(job: Job) -> Iterator[Edit]:
    if job.tensor > 1:
        for name in ("sequence_parallel", "tp_comm_overlap"):
            if not job.has(name):
                yield setting(name)
    if job.data * job.context > 1:
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            if not job.has(name):
                yield setting(name)
        if job.distributed and not job.has("overlap_grad_reduce"):
            yield setting("overlap_grad_reduce") + setting("overlap_param_gather")
    if job.interleaved and job.has("no_overlap_p2p_communication"):
        yield without("no_overlap_p2p_communication")
    if job.given is not None and job.has("attention_backend"):
        yield setting("attention_backend", "flash")


def by_cost(job: Job, layers: tuple[int, ...]) -> Edit | None:
    """These layers of stages as a layout; None where the job has them already."""
    if layers == job.stage_layers:
        return None
    others = without(*(name for name in _OTHER_SPLITS if name in job.flags))
    return others + setting(_LAYOUT, layout(layers, job.number("mtp_num_layers") or 0))
