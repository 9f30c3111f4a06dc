"""Sizes that are searched only where they are given, and with which something would fit.

Experts and the sequence are spread over ranks only where someone asks for it. Where nothing fits
without, it is found out by evaluating whether it would with: the smallest microbatches under 1F1B
with everything recomputed, or whatever is fixed, on every spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullbore.cost.model import Recompute
from fullbore.cost.model.shape import Experts
from fullbore.errors import ConfigError, ScheduleError
from fullbore.plan.choice import Choice
from fullbore.plan.evaluate import Evaluator
from fullbore.plan.question import Question
from fullbore.plan.space import choices, recomputes, spreads

__all__ = ["Relief", "relieving"]

_GIB = 2**30
_FULL = Recompute(granularity="full")
_EXPERT, _CONTEXT = "--expert-model-parallel-size", "--context-parallel-size"
_CONTEXTS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """A flag, the smallest value with which a choice fits, and the bytes of its fullest rank."""

    flag: str
    size: int
    choice: Choice
    peak_bytes: float

    @property
    def text(self) -> str:
        """What to give, and what comes of it."""
        spread = self.choice.spread
        return (
            f"give {self.flag} {self.size}, with which P={spread.pipeline} TP={spread.tensor} "
            f"needs {self.peak_bytes / _GIB:.4g} GiB"
        )


def relieving(question: Question) -> Relief | None:
    """The first size that makes something fit, of experts or else of context; None if none does."""
    for flag, sizes in _ungiven(question).items():
        for size in sizes:
            found = _fitting(question, flag, size)
            if found is not None:
                return found
    return None


def _ungiven(question: Question) -> dict[str, list[int]]:
    """Flags that nobody gave, with the sizes that may be tried."""
    fixed, tried = question.fixed, {}
    counts = {layer.mlp.count for layer in question.shape.layers if isinstance(layer.mlp, Experts)}
    if fixed.expert == (1,) and counts:
        most = max(counts)
        tried[_EXPERT] = [n for n in range(2, most + 1) if most % n == 0]
    if fixed.context == (1,):
        tried[_CONTEXT] = list(_CONTEXTS)
    return tried


def _fitting(question: Question, flag: str, size: int) -> Relief | None:
    """The first choice that fits with a size given."""
    fixed = replace(
        question.fixed,
        microbatch_size=question.fixed.microbatch_size or (1,),
        schedules=question.fixed.schedules or ("1f1b",),
        expert=(size,) if flag == _EXPERT else question.fixed.expert,
        context=(size,) if flag == _CONTEXT else question.fixed.context,
    )
    asked = replace(question, fixed=fixed)
    evaluator = Evaluator(asked)
    allowed = recomputes(asked)
    recompute = _FULL if _FULL in allowed else allowed[-1]
    try:
        found = spreads(asked)
    except ConfigError:
        return None
    for spread in found:
        for choice in choices(asked, spread):
            try:
                made = evaluator.with_layers(replace(choice, recompute=recompute))
                held = float(evaluator.held(made).max())
            except (ConfigError, ScheduleError):
                continue
            if held <= question.limit_bytes:
                return Relief(flag=flag, size=size, choice=made, peak_bytes=held)
    return None
