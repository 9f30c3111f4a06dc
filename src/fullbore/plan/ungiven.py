"""What is searched only where it is given, and with which something would fit.

Experts and the sequence are spread over ranks only where someone asks for it, and nobody is given
more nodes than there are. Where nothing fits, it is found out by evaluating whether it would with
them: the smallest microbatches under 1F1B with everything recomputed, or whatever is fixed, on
every spread.
"""

from __future__ import annotations

from collections.abc import Iterator
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
_CONTEXTS = (2, 4, 8, 16)
_MOST_DEVICES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """What to give, a choice that then fits, and the bytes of its fullest rank."""

    what: str
    choice: Choice
    peak_bytes: float

    @property
    def text(self) -> str:
        """What to give, and what comes of it."""
        spread = self.choice.spread
        return (
            f"give {self.what}, with which P={spread.pipeline} TP={spread.tensor} "
            f"needs {self.peak_bytes / _GIB:.4g} GiB"
        )


def relieving(question: Question) -> Relief | None:
    """The first that makes something fit, of experts, context and nodes; None if none does."""
    for what, asked in (*_experts(question), *_contexts(question), *_nodes(question)):
        found = _fitting(question=asked, what=what)
        if found is not None:
            return found
    return None


def _experts(question: Question) -> Iterator[tuple[str, Question]]:
    fixed = question.fixed
    counts = {layer.mlp.count for layer in question.shape.layers if isinstance(layer.mlp, Experts)}
    if fixed.expert != (1,) or not counts:
        return
    most = max(counts)
    for size in (n for n in range(2, most + 1) if most % n == 0):
        asked = replace(question, fixed=replace(fixed, expert=(size,)))
        yield f"--expert-model-parallel-size {size}", asked


def _contexts(question: Question) -> Iterator[tuple[str, Question]]:
    if question.fixed.context != (1,):
        return
    for size in _CONTEXTS:
        asked = replace(question, fixed=replace(question.fixed, context=(size,)))
        yield f"--context-parallel-size {size}", asked


def _nodes(question: Question) -> Iterator[tuple[str, Question]]:
    """Twice as many, four times, ..."""
    cluster = question.cluster
    nodes, per_node = 2 * cluster.nodes, cluster.device.gpus_per_node
    while nodes * per_node <= _MOST_DEVICES:
        asked = replace(question, cluster=replace(cluster, nodes=nodes))
        yield f"it {nodes} nodes of {per_node}", asked
        nodes *= 2


def _fitting(*, question: Question, what: str) -> Relief | None:
    """The first choice that fits."""
    fixed = replace(
        question.fixed,
        microbatch_size=question.fixed.microbatch_size or (1,),
        schedules=question.fixed.schedules or ("1f1b",),
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
                return Relief(what=what, choice=made, peak_bytes=held)
    return None
