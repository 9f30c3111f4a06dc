"""The nearest legal flags: single changes that end a violation and begin none, found by trying.

Each rule is checked anew for each value, so that a size of tensor parallelism that divides the
heads but not the cluster is not among the answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fullbore.plan.explain.broken import Broken
from fullbore.plan.explain.catalog import CHOICES, GONE, NUMBERS, OPTIONAL, SWITCHES
from fullbore.plan.explain.edit import Edit, setting, without
from fullbore.plan.explain.job import Job
from fullbore.plan.explain.rules import OF_REPLICAS, violations

__all__ = ["Violation", "judged", "mended"]

_SIZES = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    }
)
# Of the model, which nobody wants changed if anything else would do.
_MODEL = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "ffn_hidden_size",
        "moe_ffn_hidden_size",
        "num_experts",
        "swiglu",
        "squared_relu",
        "position_embedding_type",
        "mtp_num_layers",
        "untie_embeddings_and_output_weights",
    }
)
Key = tuple[object, ...]

_MOST_MICROBATCH_SIZE = 16
_MOST_MENDED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What is wrong, and the single changes that mend it and break nothing else, nearest first."""

    broken: Broken
    nearest: tuple[Edit, ...]


def judged(job: Job) -> tuple[Violation, ...]:
    """All that is wrong with a job's flags, each with what would do."""
    found = violations(job)
    before = frozenset(broken.key for broken in found)
    return tuple(
        Violation(broken=broken, nearest=_nearest(job, broken, before)) for broken in found
    )


def mended(job: Job) -> Edit | None:
    """Changes after which nothing is wrong; None where trying one after another finds none.

    Each is the one among the nearest of all violations that leaves the fewest; where none leaves
    fewer, another value of a flag that is named, or several flags left out at once.
    """
    made = Edit(changes=())
    for _ in range(_MOST_MENDED):
        now = job.changed(made)
        found = judged(now)
        if not found:
            return made
        better = (
            _best(now, (edit for violation in found for edit in violation.nearest))
            or _best(now, (edit for violation in found for edit in _all(now, violation.broken)))
            or _best(now, _left_out(now, found))
        )
        if better is None:
            return None
        made = made + better
    return None


def _left_out(job: Job, found: Iterable[Violation]) -> Iterator[Edit]:
    """All flags of a violation that may be left out; then those of all violations."""
    every: tuple[str, ...] = ()
    for violation in found:
        names = tuple(name for name in violation.broken.flags if _may_go(job, name))
        every += names
        yield without(*names)
    yield without(*dict.fromkeys(every))


def _may_go(job: Job, name: str) -> bool:
    """Whether a flag is there, and the job one without it."""
    is_needed = name in _MODEL or (name in NUMBERS and name not in OPTIONAL)
    return name in job.flags and not is_needed


def _best(job: Job, edits: Iterable[Edit]) -> Edit | None:
    """The change that leaves the fewest rules broken, the first of several; None if none helps."""
    best, fewest = None, len(violations(job))
    for edit in edits:
        left = len(violations(job.changed(edit)))
        if left < fewest:
            best, fewest = edit, left
    return best


def _nearest(job: Job, broken: Broken, before: frozenset[Key]) -> tuple[Edit, ...]:
    allowed = before - {broken.key}
    for model in (False, True):
        found: list[Edit] = []
        for name in broken.flags:
            if (name in _MODEL) == model:
                found += _sound(job, name, allowed)
        if found:
            return tuple(found)
    return ()


def _sound(job: Job, name: str, allowed: frozenset[Key]) -> Iterator[Edit]:
    """Changes of one flag: of numbers the nearest smaller and larger one, and leaving it out."""
    now, sides = job.number(name), set()
    for edit in _of_flag(job, name):
        side = _side(edit.changes[-1][1], now) if name in NUMBERS else None
        if side is not None and side in sides:
            continue
        if all(found.key in allowed or _is_new(job, found) for found in _after(job, edit)):
            sides.add(side)
            yield edit


def _after(job: Job, edit: Edit) -> tuple[Broken, ...]:
    return violations(job.changed(edit))


def _is_new(job: Job, broken: Broken) -> bool:
    """Whether a rule could not be judged before, which is no fault of the change."""
    return not job.is_whole and broken.rule in OF_REPLICAS


def _side(words: tuple[str, ...] | None, now: int | None) -> str | None:
    if not words:
        return None
    return "below" if now is not None and int(words[0]) < now else "above"


def _all(job: Job, broken: Broken) -> Iterator[Edit]:
    """Whatever could be changed, but the model."""
    for name in broken.flags:
        if name not in _MODEL:
            yield from _of_flag(job, name)


def _of_flag(job: Job, name: str) -> Iterator[Edit]:
    """What a flag could be instead; numbers by nearness."""
    is_there, now = name in job.flags, job.number(name)
    if name in _MODEL and (not is_there or (name in NUMBERS and now is None)):
        return  # nobody can guess it
    if name in NUMBERS:
        near = sorted(set(_values(job, name)) - {now}, key=lambda value: abs(value - (now or 1)))
        yield from (setting(name, value) for value in near if value >= max(1, NUMBERS[name]))
    elif name in SWITCHES and (not is_there or job.flags[name]):
        yield setting(name)
    elif name in CHOICES:
        yield from (setting(name, word) for word in CHOICES[name] if (word,) != job.flags.get(name))
    if name in GONE:
        yield without(name) + setting(GONE[name], *job.flags[name])
    if is_there and (name not in NUMBERS or name in OPTIONAL):
        yield without(name)


def _values(job: Job, name: str) -> Iterable[int]:
    """Values that a number could have, more than are legal."""
    if name in _SIZES:
        return _divisors(job.cluster.size)
    layers, pipeline = job.size("num_layers"), job.pipeline
    v = job.virtual_stages if isinstance(job.virtual_stages, int) else 1
    once = job.size("micro_batch_size") * job.data
    match name:
        case "micro_batch_size":
            return range(1, _MOST_MICROBATCH_SIZE + 1)
        case "global_batch_size":
            return _around(job.number(name) or once, once, steps=pipeline + 1)
        case "num_layers_per_virtual_pipeline_stage" | "num_virtual_stages_per_pipeline_rank":
            return range(1, layers // pipeline + 1)
        case "microbatch_group_size_per_virtual_pipeline_stage":
            return _groups(job)
        case "decoder_first_pipeline_num_layers" | "decoder_last_pipeline_num_layers":
            return range(1, min(layers, 3 * -(-layers // pipeline)) + 1)
        case "num_layers":
            return _around(layers, pipeline * v, steps=2)
        case "seq_length":
            most = job.number("max_position_embeddings") or 4096
            unit = job.tensor * (2 * job.context if job.context > 1 else 1)
            return (*_around(job.number(name) or most, unit, steps=2), most)
        case "max_position_embeddings":
            return (job.size("seq_length"),)
        case "recompute_num_layers":
            return (1,)
        case "vocab_size":
            return (50257,)  # GPT-2's, Megatron-LM's own default, for want of the user's
        case "num_experts":
            return _around(job.size(name), job.expert, steps=2)
        case "moe_router_topk":
            return range(1, job.size("num_experts") + 1)
        case _:
            return _of_model(job, name)


def _groups(job: Job) -> Iterable[int]:
    """From P to M, but for the many between that are far off."""
    microbatches = job.microbatches if isinstance(job.microbatches, int) else 1
    now = job.number("microbatch_group_size_per_virtual_pipeline_stage") or job.pipeline
    near = range(max(1, now - job.pipeline), now + job.pipeline + 1)
    return (*near, job.pipeline, microbatches)


def _of_model(job: Job, name: str) -> Iterable[int]:
    hidden, heads = job.size("hidden_size"), job.size("num_attention_heads")
    match name:
        case "num_attention_heads":
            return _divisors(hidden)
        case "num_query_groups":
            return _divisors(heads)
        case "kv_channels":
            return (max(1, hidden // heads),)
        case "hidden_size":
            return _around(hidden, heads, steps=1)
        case "ffn_hidden_size":
            return _around(job.number(name) or 4 * hidden, job.tensor, steps=1)
        case "moe_ffn_hidden_size":
            return _around(job.size(name), job.split.width_of_experts, steps=1)
        case _:
            return ()


def _around(number: int, unit: int, *, steps: int) -> list[int]:
    """Multiples of a unit near a number."""
    at = number // unit
    return [unit * k for k in range(max(1, at - steps), at + steps + 2)]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
