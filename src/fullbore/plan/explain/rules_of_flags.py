"""Rules about a flag's own value, and about flags that must or must not stand together.

Source: Megatron-LM, `megatron/training/arguments.py` (`validate_args`), and Megatron Core,
`transformer/transformer_config.py` (`__post_init__`).
"""

from __future__ import annotations

from collections.abc import Iterator

from fullbore.plan.explain.catalog import CHOICES, GONE, NUMBERS, SWITCHES, flag
from fullbore.plan.explain.edit import setting
from fullbore.plan.explain.job import Job, Refused

__all__ = ["FLAG_RULES"]

_TOGETHER: tuple[tuple[str, str, str], ...] = (
    ("fp16", "bf16", "there is one precision"),
    ("fp8_format", "fp4_format", "there is one format"),
    ("swiglu", "squared_relu", "there is one activation"),
    ("train_iters", "train_samples", "training is counted in one of them"),
    (
        "rampup_batch_size",
        "train_iters",
        "a batch that grows is counted in --train-samples (releases since April 2026 have "
        "--step-batch-size-schedule instead)",
    ),
    ("train_iters", "lr_decay_samples", "training is counted in iterations"),
    ("train_iters", "lr_warmup_samples", "training is counted in iterations"),
    ("train_samples", "lr_decay_iters", "training is counted in samples"),
    ("train_samples", "lr_warmup_iters", "training is counted in samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "they say the same twice"),
    ("lr_warmup_fraction", "lr_warmup_samples", "they say the same twice"),
    ("deterministic_mode", "use_flash_attn", "flash attention is not deterministic"),
    ("deterministic_mode", "cross_entropy_loss_fusion", "the fused loss is not deterministic"),
    ("use_torch_fsdp2", "use_distributed_optimizer", "FSDP2 shares the states out itself"),
    ("use_torch_fsdp2", "fp16", "FSDP2 has no fp16 yet"),
    ("overlap_moe_expert_parallel_comm", "recompute_method", "its layers are cut in pieces"),
    ("overlap_moe_expert_parallel_comm", "recompute_num_layers", "its layers are cut in pieces"),
    ("cpu_offloading_num_layers", "recompute_granularity", "a layer is offloaded or recomputed"),
    ("cpu_offloading_num_layers", "recompute_activations", "a layer is offloaded or recomputed"),
)

_NEEDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (
        "overlap_param_gather",
        ("use_distributed_optimizer", "use_megatron_fsdp"),
        "only then are there parameters to gather",
    ),
    ("overlap_param_gather", ("overlap_grad_reduce",), "both share their buckets"),
    (
        "overlap_param_gather_with_optimizer_step",
        ("overlap_param_gather",),
        "it is a way of doing that",
    ),
    (
        "fp8_param_gather",
        ("use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp"),
        "only then are there parameters to gather",
    ),
    ("fp8_param_gather", ("fp8_format",), "without it nothing is in fp8"),
    ("tp_comm_overlap", ("sequence_parallel",), "its messages are what is overlapped"),
    (
        "use_precision_aware_optimizer",
        ("use_distributed_optimizer", "use_megatron_fsdp"),
        "it is a kind of that",
    ),
    ("optimizer_cpu_offload", ("use_precision_aware_optimizer",), "it reuses its code"),
    ("overlap_moe_expert_parallel_comm", ("bf16", "fp16"), "there is no other kernel"),
    ("fp16_lm_cross_entropy", ("fp16",), "the loss is in the precision of the model"),
    ("fp32_residual_connection", ("bf16", "fp16"), "else everything is in fp32"),
    (
        "moe_pad_expert_input_to_capacity",
        ("moe_expert_capacity_factor",),
        "it says what the capacity is",
    ),
)


def _numbers(job: Job) -> Iterator[str]:
    for name, least in NUMBERS.items():
        words = job.flags.get(name)
        if words is None or words == ("None",):
            continue
        if len(words) != 1:
            yield f"{flag(name)} needs one value, not {' '.join(words) or 'none'}"
        elif not words[0].isdecimal() or int(words[0]) < least:
            yield f"{flag(name)} {words[0]}: it must be a whole number, {least} or more"


def _choices(job: Job) -> Iterator[str]:
    for name, known in CHOICES.items():
        words = job.flags.get(name)
        if words is not None and words != ("None",) and job.word(name) is None:
            given = " ".join(words) or "without a value"
            yield f"{flag(name)} {given}: it must be {' or '.join(known)}"


def _switches(job: Job) -> Iterator[str]:
    for name in sorted(SWITCHES & job.flags.keys()):
        if job.flags[name]:
            yield f"{flag(name)} {' '.join(job.flags[name])}: it is a switch and takes no value"


def _gone(job: Job) -> Iterator[str]:
    for name, now in GONE.items():
        if name in job.flags:
            yield f"{flag(name)} is no longer there: Megatron-LM has {flag(now)} instead"


def _together(job: Job) -> Iterator[str]:
    for one, other, why in _TOGETHER:
        if job.has(one) and job.has(other):
            yield f"{flag(one)} and {flag(other)} exclude each other: {why}"


def _needs(job: Job) -> Iterator[str]:
    for name, needed, why in _NEEDS:
        if job.has(name) and not any(job.has(other) for other in needed):
            yield f"{flag(name)} needs {' or '.join(map(flag, needed))}: {why}"


def _missing(job: Job) -> Iterator[str]:
    for name, why in (
        ("micro_batch_size", "it says how many sequences a microbatch has"),
        ("seq_length", "it says how many tokens a sequence has"),
    ):
        if name not in job.flags:
            yield f"{flag(name)} is missing: {why}"


def _model(job: Job) -> Iterator[str]:
    if list(_numbers(job)):
        return
    if "max_position_embeddings" not in job.flags:  # `_positions` says so
        job = job.changed(setting("max_position_embeddings", job.size("seq_length")))
    named = job.changed(setting("vocab_size", 1)) if "vocab_size" not in job.flags else job
    told = [tried.shape.message for tried in (job, named) if isinstance(tried.shape, Refused)]
    yield from dict.fromkeys(told)  # a missing vocabulary hides nothing else


def _positions(job: Job) -> Iterator[str]:
    sequence, most = job.number("seq_length"), job.number("max_position_embeddings")
    if sequence is None:
        return
    if "max_position_embeddings" not in job.flags:
        yield "--max-position-embeddings is missing: it must be --seq-length or more"
    elif most is not None and most < sequence:
        yield f"--max-position-embeddings {most} is less than --seq-length {sequence}"


def _prediction_layers(job: Job) -> Iterator[str]:
    kind = job.word("position_embedding_type") or "learned_absolute"
    is_rope = kind in ("rope", "none") or job.has("use_rotary_position_embeddings")
    if job.has("mtp_num_layers") and not is_rope:
        yield (
            f"--mtp-num-layers needs --position-embedding-type rope or none, not {kind}: further "
            "tokens have no learned positions"
        )


FLAG_RULES = (
    _numbers,
    _choices,
    _switches,
    _gone,
    _missing,
    _model,
    _positions,
    _prediction_layers,
    _together,
    _needs,
)
