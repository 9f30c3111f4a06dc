"""Whether a split divides a model: every refusal names the flag and the sizes that do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fullbore.cost.model.shape import (
    Attention,
    Experts,
    LatentAttention,
    LayerShape,
    Mlp,
    ModelShape,
)
from fullbore.cost.model.split import Recompute, Split
from fullbore.errors import ConfigError

__all__ = ["check", "check_length", "has_module", "refusals"]

_TENSOR = "--tensor-model-parallel-size"
_CONTEXT = "--context-parallel-size"
_EXPERT = "--expert-model-parallel-size"
_EXPERT_TENSOR = "--expert-tensor-parallel-size"
_LARGEST = 10**12  # what no size comes near
_ABSENT = {
    "mla_up_proj": "no latent attention",
    "moe": "no experts",
    "moe_act": "no experts",
    "shared_experts": "no shared experts",
}  # of modules that are made again, why a model may have none


def check(
    shape: ModelShape, split: Split, *, sequence: int, microbatch: int, recompute: Recompute
) -> None:
    """Raise ConfigError unless every size is at least 1 and divides what it cuts."""
    found = refusals(shape, split, sequence=sequence, microbatch=microbatch, recompute=recompute)
    for refusal in found:
        raise ConfigError(refusal)


def check_length(shape: ModelShape, sequence: int) -> None:
    """Raise ConfigError where a sequence is longer than there are learned positions."""
    longest = shape.longest
    if longest is not None and sequence > longest:
        raise ConfigError(
            f"--seq-length {str(sequence)[:60]}: this model has learned {longest} positions; use "
            f"at most {longest}"
        )


def has_module(shape: ModelShape, module: str) -> bool:
    """Whether there is anything that a module of selective recomputation would make again."""
    mixtures = [layer.mlp for layer in shape.layers if isinstance(layer.mlp, Experts)]
    match module:
        case "mla_up_proj":
            return any(isinstance(layer.attention, LatentAttention) for layer in shape.layers)
        case "moe" | "moe_act":
            return bool(mixtures)
        case "shared_experts":
            return any(mixture.shared is not None for mixture in mixtures)
        case _:
            return True


def refusals(
    shape: ModelShape, split: Split, *, sequence: int, microbatch: int, recompute: Recompute
) -> Iterator[str]:
    """Everything that stands against a split, each with its flag and what would do."""
    impossible = [
        f"{flag} {str(size)[:60]}: it must be 1 to {_LARGEST:.0e}"
        if size > 1
        else f"{flag} {size}: it must be 1 or more"
        for flag, size in _sizes(split, sequence=sequence, microbatch=microbatch)
        if not 1 <= size <= _LARGEST
    ]
    yield from impossible
    if not impossible:
        yield from _sequence_refused(split, sequence)
        for layer in dict.fromkeys(shape.layers):
            yield from _tensor_refused(layer, split.tensor)
            yield from _experts_refused(layer, split)
        yield from _expert_parallel_refused(shape, split)
    yield from _recompute_refused(shape, recompute)


def _sizes(split: Split, *, sequence: int, microbatch: int) -> Iterable[tuple[str, int]]:
    return (
        (_TENSOR, split.tensor),
        (_CONTEXT, split.context),
        (_EXPERT, split.expert),
        (_EXPERT_TENSOR, split.width_of_experts),
        ("--seq-length", sequence),
        ("--micro-batch-size", microbatch),
    )


def _recompute_refused(shape: ModelShape, recompute: Recompute) -> Iterator[str]:
    for module in recompute.modules:
        if not has_module(shape, module):
            yield f"--recompute-modules {module}: {shape.name} has {_ABSENT[module]}; leave it out"
    if recompute.layers is not None and recompute.granularity != "full":
        yield "--recompute-num-layers needs --recompute-granularity full"
    if recompute.layers is not None and recompute.layers < 0:
        yield f"--recompute-num-layers {recompute.layers}: it must be 0 or more"


def _expert_parallel_refused(shape: ModelShape, split: Split) -> Iterator[str]:
    if split.expert == 1 and split.width_of_experts == split.tensor:
        return
    other = split.expert == 1
    flag, size = (_EXPERT_TENSOR, split.width_of_experts) if other else (_EXPERT, split.expert)
    if not any(isinstance(layer.mlp, Experts) for layer in shape.layers):
        yield f"{flag} {size}: {shape.name} has no experts; leave it out"
    elif split.tensor > 1 and not split.sequence_parallel:
        yield (
            f"{flag} {size} with {_TENSOR} {split.tensor} needs --sequence-parallel, or every "
            "tensor-parallel rank would send the same tokens"
        )


def _sequence_refused(split: Split, sequence: int) -> Iterator[str]:
    if split.sequence_parallel and split.tensor == 1:
        yield f"--sequence-parallel cuts over {_TENSOR}: give that 2 or more"
    cut = split.tensor if split.sequence_parallel else 1
    # Context-parallel ranks take two chunks each, one from either end, so causal work is even.
    parts = cut * (2 * split.context if split.context > 1 else 1)
    if sequence % parts:
        below, above = sequence // parts * parts, (sequence // parts + 1) * parts
        nearest = f"{below} or {above}" if below else f"{above}"
        asking = {
            f"{_CONTEXT} {split.context}": split.context,
            f"--sequence-parallel with {_TENSOR} {cut}": cut,
        }
        what = " and ".join(flag for flag, size in asking.items() if size > 1)
        yield f"--seq-length {sequence} is not divided by {parts} ({what}): use {nearest}"


def _tensor_refused(layer: LayerShape, tensor: int) -> Iterator[str]:
    attention = layer.attention
    yield from _undivided(_TENSOR, tensor, "attention heads", attention.heads)
    if isinstance(attention, Attention) and attention.groups % tensor and tensor % attention.groups:
        yield _refusal(_TENSOR, tensor, "groups of keys and values", attention.groups)
    mlp = layer.mlp if isinstance(layer.mlp, Mlp) else layer.mlp.shared
    if mlp is not None:
        yield from _undivided(_TENSOR, tensor, "MLP width", mlp.width)


def _experts_refused(layer: LayerShape, split: Split) -> Iterator[str]:
    if not isinstance(layer.mlp, Experts):
        return
    yield from _undivided(_EXPERT, split.expert, "experts", layer.mlp.count)
    yield from _undivided(
        _EXPERT_TENSOR, split.width_of_experts, "width of an expert", layer.mlp.width
    )


def _undivided(flag: str, size: int, what: str, count: int) -> Iterator[str]:
    if count % size:
        yield _refusal(flag, size, what, count)


def _refusal(flag: str, size: int, what: str, count: int) -> str:
    return f"{flag} {size} does not divide the {count} {what}: use {_listed(_around(count, size))}"


def _around(count: int, size: int) -> list[int]:
    """The nearest divisors on either side."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    below: Iterable[int] = (number for number in reversed(divisors) if number < size)
    above: Iterable[int] = (number for number in divisors if number > size)
    return [number for number in (next(iter(below), None), next(iter(above), None)) if number]


def _listed(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))
