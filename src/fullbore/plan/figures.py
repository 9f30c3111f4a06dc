"""What a step's time means: tokens a second, and utilization of the devices' peak.

MFU counts the FLOPs that the model needs, HFU also what is computed again. Both divide by the dense
peak of all devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fullbore.cost.model import Piece, Recompute, Split
from fullbore.cost.model.layer import pieces
from fullbore.cost.model.totals import totals
from fullbore.plan.choice import Choice
from fullbore.plan.question import Question

__all__ = ["Figures", "figures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """model_flops, hardware_flops: of a step, all devices together; shares from 0 to 1."""

    tokens_per_s: float
    tokens_per_s_per_device: float
    model_flops: float
    hardware_flops: float
    mfu: float
    hfu: float


def figures(question: Question, choice: Choice, *, step_s: float) -> Figures:
    """Rates of a choice (with layers) whose step takes so long."""
    assert choice.layers is not None
    cluster = question.cluster
    whole = _pieces(question, Recompute())
    model = totals(whole).model_flops * question.global_batch
    again = _recomputed_flops(question, choice) * question.global_batch
    peak = cluster.device.peak_flop_per_s(question.precision.name) * cluster.size
    tokens = question.global_batch * question.sequence / step_s
    return Figures(
        tokens_per_s=tokens,
        tokens_per_s_per_device=tokens / cluster.size,
        model_flops=model,
        hardware_flops=model + again,
        mfu=model / step_s / peak,
        hfu=(model + again) / step_s / peak,
    )


def _recomputed_flops(question: Question, choice: Choice) -> float:
    """Of one sequence, by the layers that are made again."""
    again = choice.recompute
    if again.granularity == "none":
        return 0.0
    made = _pieces(question, replace(again, layers=None))[1:-1]
    if again.layers is None:
        return sum(piece.recomputed_flops for piece in made)
    total, start = 0.0, 0
    for number in choice.layers or ():
        chosen = made[start : start + min(number, again.layers)]
        total += sum(piece.recomputed_flops for piece in chosen)
        start += number
    return total


def _pieces(question: Question, recompute: Recompute) -> tuple[Piece, ...]:
    """One sequence through the whole model on one rank."""
    return pieces(
        question.shape,
        Split(),
        sequence=question.sequence,
        microbatch=1,
        recompute=recompute,
        precision=question.precision,
        causal=question.causal,
        kernels=question.kernels,
    )
