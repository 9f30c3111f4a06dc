"""Rules about ranks: what each kind of parallelism divides, and what the batch is divided by.

Source: Megatron-LM, `megatron/training/arguments.py`; Megatron Core, `parallel_state.py`,
`transformer/transformer_config.py` and `transformer/moe/moe_layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullbore.cost.hardware import Layout
from fullbore.cost.model import Recompute
from fullbore.cost.model.legal import refusals
from fullbore.errors import ConfigError
from fullbore.plan.explain.asked import capture_of, precision_of
from fullbore.plan.explain.catalog import flag
from fullbore.plan.explain.job import Job, Refused

__all__ = ["RANK_RULES"]


def _world(job: Job) -> Iterator[str]:
    if not job.is_whole:
        context = f" x --context-parallel-size {job.context}" if job.context > 1 else ""
        devices, one = job.cluster.size, job.one_replica
        yield (
            f"--tensor-model-parallel-size {job.tensor} x --pipeline-model-parallel-size "
            f"{job.pipeline}{context} = {one} does not divide the {devices} devices of "
            f"{job.cluster.name}; {_multiples(devices, one)} would do"
        )


def _multiples(number: int, unit: int) -> str:
    below = number // unit * unit
    return f"{below} or {below + unit} of them" if below else f"{unit} of them"


def _divided(job: Job) -> Iterator[str]:
    """What the model's own check says."""
    sequence, shape = job.number("seq_length"), job.shape
    if isinstance(shape, Refused):
        return
    yield from dict.fromkeys(
        refusals(
            shape,
            job.split,
            sequence=sequence or 2 * job.context * job.tensor,
            microbatch=job.size("micro_batch_size"),
            recompute=Recompute(),
        )
    )


def _experts(job: Job) -> Iterator[str]:
    if not job.has("num_experts"):
        return
    if job.tensor > 1 and not job.sequence_parallel and job.expert == 1:
        yield (
            f"--num-experts with --tensor-model-parallel-size {job.tensor} needs "
            "--sequence-parallel: Megatron Core refuses to train experts without it"
        )
    if job.expert > 1 and job.has("fp16"):
        yield "--expert-model-parallel-size with --fp16: experts are spread in bf16 only"
    if job.has("moe_grouped_gemm") and not job.has("bf16"):
        yield "--moe-grouped-gemm needs --bf16: there is no other kernel"


def _experts_beside(job: Job) -> Iterator[str]:
    name = "overlap_moe_expert_parallel_comm"
    if not job.has(name):
        return
    if job.expert == 1:
        yield f"{flag(name)} needs --expert-model-parallel-size 2 or more: else nothing is sent"
    if job.word("moe_token_dispatcher_type") in (None, "allgather"):
        yield f"{flag(name)} needs --moe-token-dispatcher-type alltoall or flex"
    if job.pipeline > 1 and not job.interleaved and isinstance(job.virtual_stages, int):
        yield (
            f"{flag(name)} with --pipeline-model-parallel-size {job.pipeline} needs "
            "--num-virtual-stages-per-pipeline-rank 2 or more: another chunk's microbatch computes "
            "meanwhile"
        )


def _expert_ranks(job: Job) -> Iterator[str]:
    if not job.is_whole or (job.expert == 1 and job.split.expert_tensor is None):
        return
    try:
        Layout(
            cluster=job.cluster,
            tensor=job.tensor,
            context=job.context,
            expert=job.expert,
            data=job.data,
            pipeline=job.pipeline,
            expert_tensor=job.split.expert_tensor,
        )
    except ConfigError:
        width = job.split.width_of_experts
        yield (
            f"--expert-model-parallel-size {job.expert} x --expert-tensor-parallel-size {width} x "
            f"--pipeline-model-parallel-size {job.pipeline} = "
            f"{job.expert * width * job.pipeline} does not divide the {job.cluster.size} devices "
            f"of {job.cluster.name}"
        )


def _batch(job: Job) -> Iterator[str]:
    if job.number("micro_batch_size") is None or not job.is_whole:
        return  # said by another rule
    if isinstance(job.microbatches, Refused):
        yield job.microbatches.message


def _fsdp(job: Job) -> Iterator[str]:
    if not job.has("use_torch_fsdp2"):
        return
    if job.pipeline > 1:
        yield f"--use-torch-fsdp2 with --pipeline-model-parallel-size {job.pipeline}: it has none"
    if job.expert > 1:
        yield f"--use-torch-fsdp2 with --expert-model-parallel-size {job.expert}: it has none"
    if not job.has("untie_embeddings_and_output_weights"):
        yield "--use-torch-fsdp2 needs --untie-embeddings-and-output-weights"


def _precision(job: Job) -> Iterator[str]:
    """8 bits on a device whose products have none: Transformer Engine refuses it."""
    precision = precision_of(job)
    if precision.is_narrow and not _has_peak(job):
        yield f"--fp8-format: {_no_peak(job)}"


def _peak(job: Job) -> Iterator[str]:
    """What runs on every device, and has no figure here to be priced with."""
    if precision_of(job).is_narrow or _has_peak(job):
        return
    given = [name for name in ("bf16", "fp16") if job.has(name)]
    yield f"{flag(given[0]) if given else 'neither --bf16 nor --fp16'}: {_no_peak(job)}"


def _has_peak(job: Job) -> bool:
    return not _no_peak(job)


def _no_peak(job: Job) -> str:
    try:
        job.cluster.device.peak_flop_per_s(precision_of(job).name)
    except ConfigError as error:
        return str(error)
    return ""


def _graphs(job: Job) -> Iterator[str]:
    try:
        capture = capture_of(job)
    except ConfigError as error:
        yield str(error)
        return
    whole = capture.implementation in ("local", "transformer_engine") and capture.has("moe")
    if whole and job.has("num_experts") and not job.has("moe_pad_expert_input_to_capacity"):
        yield (
            "--cuda-graph-impl with the module moe needs --moe-expert-capacity-factor and "
            "--moe-pad-expert-input-to-capacity: without them experts take another number of "
            "tokens each time; name --cuda-graph-modules attn moe_router moe_preprocess"
        )


RANK_RULES = (
    _graphs,
    _precision,
    _peak,
    _world,
    _divided,
    _experts,
    _experts_beside,
    _expert_ranks,
    _batch,
    _fsdp,
)
