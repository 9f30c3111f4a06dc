"""What a training step is told by."""

from __future__ import annotations

from dataclasses import dataclass

from fullbore.timeline import Timeline

__all__ = ["StepReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one training step gave, the same on every rank.

    step: counted from 1. step_s: seconds of the whole step, optimizer included. mfu: model FLOPs
    against the ranks' peak together. tokens_per_s: over all replicas. bubble_fraction: measured;
    None where that means nothing, since ranks share cores. timeline and the bytes (see
    `StepResult`): of rank 0's replica, with recording on.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    mfu: float
    bubble_fraction: float | None
    timeline: Timeline | None
    peak_activation_bytes: tuple[int, ...] | None
    stage_activation_bytes: tuple[int, ...] | None
    stage_held_bytes: tuple[int, ...] | None
    stage_input_bytes: tuple[int, ...] | None
    stage_offload_bytes: tuple[int, ...] | None
