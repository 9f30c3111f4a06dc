"""Why not otherwise: the winner with one number changed, and what would come of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

from fullbore.cost.model import Recompute
from fullbore.errors import ConfigError, ScheduleError
from fullbore.plan.choice import NONE, Choice, Spread, recompute_name
from fullbore.plan.evaluate import Evaluated, Evaluator
from fullbore.plan.parts import Parts, parts_of
from fullbore.plan.programs import RUNNABLE, groups
from fullbore.plan.question import Question
from fullbore.plan.space import cheap_recomputes, is_asked, make_spread
from fullbore.plan.splits import even
from fullbore.schedules import Family

__all__ = ["Neighbour", "faster", "neighbours", "of_family", "why"]

Known = Mapping[tuple[Spread, str], Evaluated]

_GIB = 2**30
_GAIN = 1e-9  # less is rounding
_SAME = 1e-4  # of the winner's step: what no measurement could tell apart
_NOTABLE = 0.001  # of the winner's step: what is less is not worth a word

_SIZES = {
    "P": "pipeline",
    "TP": "tensor",
    "CP": "context",
    "EP": "expert",
    "micro-batch size": "microbatch_size",
}
_ALWAYS = ("pipeline", "tensor", "microbatch_size")

_NAMES = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "exposed_s": "exposed communication within stages",
    "host_s": "waiting for the host",
    "bubble_s": "bubble",
    "imbalance_s": "imbalance",
    "communication_s": "exposed communication between stages",
    "reduction_s": "exposed gradient reduction",
    "optimizer_s": "optimizer",
}  # what is lost to waiting for the slow is a share of all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The winner with one thing changed: what, what came of it (None where it cannot be), why not.

    slower: by which share of the winner's step it is slower; None where it does not fit or exist.
    """

    change: str
    reason: str
    evaluated: Evaluated | None = None
    slower: float | None = None


def neighbours(evaluator: Evaluator, winner: Evaluated, *, known: Known) -> tuple[Neighbour, ...]:
    """Every neighbour, in a fixed order; some may have been considered, and some could not be.

    known: the best plans found of a spread and schedule. Another schedule is told of at its best,
    with its own stages and layers, where one is known.
    """
    base = parts_of(evaluator, winner.choice)
    return tuple(
        _judged(evaluator, winner, base, change, made)
        for change, made in _changed(evaluator, winner.choice, known)
    )


def faster(evaluator: Evaluator, winner: Evaluated) -> Evaluated | None:
    """The fastest neighbour that fits and may be chosen, where it is faster than the winner."""
    best, goal_s = None, winner.step_s * (1 - _GAIN)
    for _, made in _changed(evaluator, winner.choice, {}):
        if isinstance(made, str) or not is_asked(evaluator.question, made):
            continue
        try:
            one = evaluator.evaluate(made)
        except (ConfigError, ScheduleError):
            continue
        if one.fits and one.step_s < goal_s:
            best, goal_s = one, one.step_s
    return best


def _judged(
    evaluator: Evaluator, winner: Evaluated, base: Parts, change: str, made: Choice | str
) -> Neighbour:
    if isinstance(made, str):
        return Neighbour(change=change, reason=made)
    try:
        one = evaluator.evaluate(made)
    except (ConfigError, ScheduleError) as error:
        return Neighbour(change=change, reason=str(error).splitlines()[0])
    if not one.fits:
        limit = evaluator.question.limit_bytes
        needs = one.peak_bytes / _GIB
        digits = 1 if needs - limit / _GIB >= 0.05 else 4
        reason = f"rank {one.worst_rank} needs {needs:.{digits}f} GiB of {limit / _GIB:.4g} GiB"
        return Neighbour(change=change, reason=reason, evaluated=one)
    slower = one.step_s / winner.step_s - 1
    if abs(slower) < _SAME:
        more = (one.peak_bytes - winner.peak_bytes) / _GIB
        reason = f"as fast, {more:+.1f} GiB on the fullest rank"
        return Neighbour(change=change, reason=reason, evaluated=one, slower=slower)
    reason = why(slower, base, parts_of(evaluator, one.choice), winner.step_s)
    if slower < 0 and not is_asked(evaluator.question, one.choice):
        reason += "; but other flags were asked for"
    return Neighbour(change=change, reason=reason, evaluated=one, slower=slower)


def why(slower: float, base: Parts, other: Parts, step_s: float) -> str:
    """By how much, and which parts of the step grew the most."""
    grown = sorted(
        ((getattr(other, f.name) - getattr(base, f.name)) / step_s, _NAMES[f.name])
        for f in fields(Parts)
        if f.name in _NAMES
    )
    worst = [f"{share * 100:+.1f} % {name}" for share, name in grown[::-1][:2] if share > _NOTABLE]
    best = [f"{share * 100:+.1f} % {name}" for share, name in grown[:1] if share < -_NOTABLE]
    how = "slower" if slower > 0 else "faster"
    return f"{abs(slower) * 100:.1f} % {how}: {', '.join([*worst, *best]) or 'small differences'}"


def _changed(
    evaluator: Evaluator, choice: Choice, known: Known
) -> Iterator[tuple[str, Choice | str]]:
    question, base = evaluator.question, evaluator.programs.base(choice)
    yield from _other_spreads(question, base)
    yield from _other_stages(base)
    yield from _other_schedules(choice, known)
    yield from _other_recomputation(question, choice)
    yield from _other_split(question, choice)


def _other_spreads(question: Question, choice: Choice) -> Iterator[tuple[str, Choice | str]]:
    """Sizes twice and half as large, where the rest goes to replicas; and what is spread at all."""
    spread = choice.spread
    for name, key in _SIZES.items():
        size = getattr(spread, key)
        if key not in _ALWAYS and size == 1 and getattr(question.fixed, key) == (1,):
            continue  # nobody asked for it
        for other in (size // 2, size * 2):
            if other >= 1:
                sizes = {key: getattr(spread, key) for key in _SIZES.values()} | {key: other}
                yield f"{name}={other}", _respread(question, choice, sizes)
    if spread.distributed:
        plain = replace(spread, distributed=False)
        yield "every replica with all optimizer states", replace(choice, spread=plain)
    if spread.sequence_parallel:
        whole = replace(spread, sequence_parallel=False)
        yield "no sequence parallelism", replace(choice, spread=whole)


def _respread(question: Question, choice: Choice, sizes: Mapping[str, int]) -> Choice | str:
    """The choice with other sizes, its layers split anew; or why that cannot be."""
    try:
        made = make_spread(question, **sizes)
    except ConfigError as error:
        return str(error).splitlines()[0]
    return replace(choice, spread=made, layers=None, group=_group(choice, made.pipeline))


def _group(choice: Choice, pipeline: int) -> int | None:
    """The same G, in proportion to P."""
    if choice.group is None:
        return None
    return max(1, choice.group * pipeline // choice.spread.pipeline)


def _other_stages(choice: Choice) -> Iterator[tuple[str, Choice]]:
    family = next((f for f in RUNNABLE if f.name == choice.schedule), None)
    if family is None:
        return
    v = choice.virtual_stages
    if family.takes_virtual_stages:
        for other in dict.fromkeys((v // 2, v - 1, v + 1, v * 2)):
            if other >= 1:
                yield f"v={other}", replace(choice, virtual_stages=other, layers=None)
    ranks, microbatches = choice.spread.pipeline, choice.spread.microbatches
    for group in groups(family, ranks=ranks, microbatches=microbatches):
        if group is not None and group != choice.group:
            yield f"G={group}", replace(choice, group=group)


def _other_schedules(choice: Choice, known: Known) -> Iterator[tuple[str, Choice]]:
    """Every other family: as it is best known on this spread, or else at about the winner's v."""
    if choice.spread.pipeline == 1:
        return
    for family in RUNNABLE:
        if family.name == choice.schedule:
            continue
        best = known.get((choice.spread, family.name))
        made = of_family(choice, family) if best is None else best.choice
        told = [family.name]
        if made.virtual_stages != choice.virtual_stages:
            told.append(f"v={made.virtual_stages}")
        if made.recompute != choice.recompute:
            told.append(f"recompute {recompute_name(made.recompute)}")
        yield ", ".join(told), made


def of_family(choice: Choice, family: Family) -> Choice:
    """The choice under another schedule, at about its v, its layers split by cost."""
    v = family.default_virtual_stages
    if family.takes_virtual_stages:
        v = max(2, choice.virtual_stages)
    group = choice.spread.pipeline if family.takes_group else None
    return replace(choice, schedule=family.name, virtual_stages=v, group=group, layers=None)


def _other_recomputation(question: Question, choice: Choice) -> Iterator[tuple[str, Choice]]:
    selective, full = (Recompute(granularity=g) for g in ("selective", "full"))
    for other in (NONE, selective, *cheap_recomputes(question), full):
        if other != choice.recompute:
            yield f"recompute {recompute_name(other)}", replace(choice, recompute=other)


def _other_split(question: Question, choice: Choice) -> Iterator[tuple[str, Choice | str]]:
    layers = len(question.shape.layers)
    equal = even(layers=layers, stages=choice.stages)
    if equal is None:
        yield (
            "the same number of layers everywhere",
            f"{layers} layers do not divide over {choice.stages} stages",
        )
    elif equal != choice.layers:
        yield "the same number of layers everywhere", replace(choice, layers=equal)
