"""What a step gives: losses and outputs, and with recording the figures of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fullbore.ir import Schedule
from fullbore.runtime.batch import Batch
from fullbore.runtime.recorder import RankRecord, assemble
from fullbore.timeline import Timeline

__all__ = ["StepResult", "make_result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step or evaluation gave.

    loss: mean over the microbatches of all replicas (their sum with reduction="sum", over what
        count_fn counts where there is one), the same on every rank; None where an evaluation had
        no targets.
    losses: one scalar tensor a microbatch (or slice) where the last stage is, else None.
    outputs: one entry a microbatch (or slice) where the last stage is, if asked for, else None.
    step_s: seconds from the ranks' agreement to begin until every rank had the loss.
    timeline: of all ranks of this replica, on each of them, with record=True.
    peak_activation_bytes: a rank each, with record=True: most bytes that autograd kept at once.
    stage_activation_bytes: a stage each, with record=True: most that it kept for one microbatch.
    stage_held_bytes: a stage each, with record=True where a backward is split: most that waits for
        one microbatch between I and W.
    stage_input_bytes: a stage each, with record=True where a stage recomputes: most that is kept
        for one microbatch until it does.
    stage_offload_bytes: a stage each, with record=True where the schedule offloads: most that
        leaves for the host for one microbatch.
    boundary_messages: a rank each, with record=True: most receives posted at once so far.
    peak_allocated_bytes: a rank each, with record=True on CUDA: most bytes that the allocator had
        given out, parameters and all else included.
    """

    loss: float | None
    losses: list[torch.Tensor] | None
    outputs: list[Any] | None
    step_s: float
    timeline: Timeline | None = None
    peak_activation_bytes: tuple[int, ...] | None = None
    stage_activation_bytes: tuple[int, ...] | None = None
    stage_held_bytes: tuple[int, ...] | None = None
    stage_input_bytes: tuple[int, ...] | None = None
    stage_offload_bytes: tuple[int, ...] | None = None
    boundary_messages: tuple[int, ...] | None = None
    peak_allocated_bytes: tuple[int, ...] | None = None


def make_result(
    batch: Batch,
    *,
    loss: float | None,
    step_s: float,
    records: list[RankRecord] | None,
    schedule: Schedule,
    has_last: bool,
) -> StepResult:
    """The result of a batch. records: of all ranks; has_last: whether the last stage is here."""
    result = StepResult(
        loss=loss,
        losses=batch.losses.tensors() if has_last and batch.losses else None,
        outputs=_in_order(batch.outputs, schedule),
        step_s=step_s,
    )
    if not records:
        return result
    held = [dict.fromkeys(r.stage_bytes, 0) | r.held_bytes for r in records]
    inputs = [r.stage_bytes | r.input_bytes for r in records]
    left = [dict.fromkeys(r.stage_bytes, 0) | r.offload_bytes for r in records]
    allocated = [r.allocated_bytes for r in records if r.allocated_bytes is not None]
    return replace(
        result,
        timeline=assemble(records, name=schedule.name),
        peak_activation_bytes=tuple(r.peak_bytes for r in records),
        stage_activation_bytes=_by_stage([r.stage_bytes for r in records]),
        stage_held_bytes=_by_stage(held) if any(r.held_bytes for r in records) else None,
        stage_input_bytes=_by_stage(inputs) if any(r.input_bytes for r in records) else None,
        stage_offload_bytes=_by_stage(left) if any(r.offload_bytes for r in records) else None,
        boundary_messages=tuple(r.boundary_messages for r in records),
        peak_allocated_bytes=tuple(allocated) if len(allocated) == len(records) else None,
    )


def _in_order(found: dict[int, Any], schedule: Schedule) -> list[Any] | None:
    """By microbatch; None where there are none."""
    return [found[m] for m in range(schedule.microbatches)] if found else None


def _by_stage(ranks: Sequence[dict[int, int]]) -> tuple[int, ...]:
    of_stage = {stage: size for of_rank in ranks for stage, size in of_rank.items()}
    return tuple(size for _, size in sorted(of_stage.items()))
