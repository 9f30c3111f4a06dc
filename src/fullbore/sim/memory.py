"""Activation bytes over time, from a timeline and the bytes that costs name."""

from __future__ import annotations

from fullbore.cost import Costs
from fullbore.ir import Schedule
from fullbore.timeline import Curve, Timeline, live_curves

__all__ = ["memory_curves"]


def memory_curves(timeline: Timeline, schedule: Schedule, costs: Costs) -> tuple[Curve, ...] | None:
    """Bytes that each rank holds, a curve a rank; None where the costs do not say the bytes."""
    held, after_input_grad = [], []
    for stage in costs.stages:
        if stage.activation_bytes is None:
            return None
        held.append(stage.activation_bytes)
        kept = stage.input_grad_held_bytes
        after_input_grad.append(stage.activation_bytes if kept is None else kept)
    return live_curves(
        timeline,
        schedule,
        held_after_forward=held,
        held_after_input_grad=after_input_grad,
        held_before_recompute=[stage.recompute_input_bytes for stage in costs.stages],
        leaves_at_offload=[stage.offload_bytes for stage in costs.stages],
    )
