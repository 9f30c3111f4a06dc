"""Whether a split divides a model: every refusal names the flag and the sizes that do."""

from __future__ import annotations

from collections.abc import Iterable

from fullbore.cost.model.shape import Attention, Experts, LayerShape, Mlp, ModelShape
from fullbore.cost.model.split import Recompute, Split
from fullbore.errors import ConfigError

__all__ = ["check"]

_TENSOR = "--tensor-model-parallel-size"
_CONTEXT = "--context-parallel-size"
_EXPERT = "--expert-model-parallel-size"
_EXPERT_TENSOR = "--expert-tensor-parallel-size"
_LARGEST = 10**12  # what no size comes near


def check(
    shape: ModelShape, split: Split, *, sequence: int, microbatch: int, recompute: Recompute
) -> None:
    """Raise ConfigError unless every size is at least 1 and divides what it cuts."""
    for flag, size in (
        (_TENSOR, split.tensor),
        (_CONTEXT, split.context),
        (_EXPERT, split.expert),
        (_EXPERT_TENSOR, split.width_of_experts),
        ("--seq-length", sequence),
        ("--micro-batch-size", microbatch),
    ):
        if size < 1:
            raise ConfigError(f"{flag} {size}: it must be 1 or more")
        if size > _LARGEST:
            raise ConfigError(f"{flag} {str(size)[:60]}: it must be 1 to {_LARGEST:.0e}")
    _check_sequence(split, sequence)
    for layer in dict.fromkeys(shape.layers):
        _check_tensor(layer, split.tensor)
        _check_experts(layer, split)
    _check_expert_parallel(shape, split)
    if recompute.layers is not None and recompute.granularity != "full":
        raise ConfigError("--recompute-num-layers needs --recompute-granularity full")
    if recompute.layers is not None and recompute.layers < 0:
        raise ConfigError(f"--recompute-num-layers {recompute.layers}: it must be 0 or more")


def _check_expert_parallel(shape: ModelShape, split: Split) -> None:
    if split.expert == 1 and split.width_of_experts == split.tensor:
        return
    other = split.expert == 1
    flag, size = (_EXPERT_TENSOR, split.width_of_experts) if other else (_EXPERT, split.expert)
    if not any(isinstance(layer.mlp, Experts) for layer in shape.layers):
        raise ConfigError(f"{flag} {size}: {shape.name} has no experts; leave it out")
    if split.tensor > 1 and not split.sequence_parallel:
        raise ConfigError(
            f"{flag} {size} with {_TENSOR} {split.tensor} needs --sequence-parallel, or every "
            "tensor-parallel rank would send the same tokens"
        )


def _check_sequence(split: Split, sequence: int) -> None:
    if split.sequence_parallel and split.tensor == 1:
        raise ConfigError(f"--sequence-parallel cuts over {_TENSOR}: give that 2 or more")
    cut = split.tensor if split.sequence_parallel else 1
    # Context-parallel ranks take two chunks each, one from either end, so causal work is even.
    parts = cut * (2 * split.context if split.context > 1 else 1)
    if sequence % parts:
        below, above = sequence // parts * parts, (sequence // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        what = f"{_CONTEXT} and --sequence-parallel" if cut > 1 else _CONTEXT
        raise ConfigError(
            f"--seq-length {sequence} is not divided by {parts}, which {what} ask for: "
            f"use {nearest}"
        )


def _check_tensor(layer: LayerShape, tensor: int) -> None:
    attention = layer.attention
    _divide(_TENSOR, tensor, "attention heads", attention.heads)
    if isinstance(attention, Attention) and attention.groups % tensor and tensor % attention.groups:
        _refuse(_TENSOR, tensor, "groups of keys and values", attention.groups)
    mlp = layer.mlp if isinstance(layer.mlp, Mlp) else layer.mlp.shared
    if mlp is not None:
        _divide(_TENSOR, tensor, "MLP width", mlp.width)


def _check_experts(layer: LayerShape, split: Split) -> None:
    if not isinstance(layer.mlp, Experts):
        return
    _divide(_EXPERT, split.expert, "experts", layer.mlp.count)
    _divide(_EXPERT_TENSOR, split.width_of_experts, "width of an expert", layer.mlp.width)


def _divide(flag: str, size: int, what: str, count: int) -> None:
    if count % size:
        _refuse(flag, size, what, count)


def _refuse(flag: str, size: int, what: str, count: int) -> None:
    raise ConfigError(
        f"{flag} {size} does not divide the {count} {what}: use {_listed(_around(count, size))}"
    )


def _around(count: int, size: int) -> list[int]:
    """The nearest divisors on either side."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    below: Iterable[int] = (number for number in reversed(divisors) if number < size)
    above: Iterable[int] = (number for number in divisors if number > size)
    return [number for number in (next(iter(below), None), next(iter(above), None)) if number]


def _listed(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
