"""What a step gave, as its caller sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullbore.runtime.batch import Batch
from fullbore.runtime.recorder import RankRecord, assemble
from fullbore.timeline import Timeline

__all__ = ["StepResult", "result_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step or evaluation gave.

    loss: mean over the microbatches of all replicas (their sum with reduction="sum", over what
        count_fn counts where there is one), the same on every rank; None where an evaluation had
        no targets.
    losses: one scalar tensor a microbatch where the last stage is, else None.
    outputs: one entry a microbatch where the last stage is, if asked for, else None.
    step_s: seconds from the ranks' agreement to begin until every rank had the loss.
    timeline: of all ranks of this replica, on each of them, with record=True.
    peak_activation_bytes: a rank each, with record=True: most bytes that autograd kept at once.
    stage_activation_bytes: a stage each, with record=True: most that it kept for one microbatch.
    stage_held_bytes: a stage each, with record=True where a backward is split: most that waits for
        one microbatch between I and W.
    boundary_messages: a rank each, with record=True: most receives posted at once so far.
    """

    loss: float | None
    losses: list[torch.Tensor] | None
    outputs: list[Any] | None
    step_s: float
    timeline: Timeline | None = None
    peak_activation_bytes: tuple[int, ...] | None = None
    stage_activation_bytes: tuple[int, ...] | None = None
    stage_held_bytes: tuple[int, ...] | None = None
    boundary_messages: tuple[int, ...] | None = None


def result_of(
    batch: Batch,
    *,
    name: str,
    last: bool,
    loss: float | None,
    step_s: float,
    records: list[RankRecord] | None,
) -> StepResult:
    """The result of a batch on one rank.

    name: of the schedule. last: whether the last stage is here. records: of all ranks, if any.
    """
    microbatches = range(len(batch.inputs))
    return StepResult(
        loss=loss,
        losses=batch.losses.tensors() if last and batch.losses else None,
        outputs=[batch.outputs[m] for m in microbatches] if batch.outputs else None,
        step_s=step_s,
        timeline=assemble(records, name=name) if records else None,
        peak_activation_bytes=tuple(r.peak_bytes for r in records) if records else None,
        stage_activation_bytes=_by_stage([r.stage_bytes for r in records]) if records else None,
        stage_held_bytes=_held(records) if records else None,
        boundary_messages=tuple(r.boundary_messages for r in records) if records else None,
    )


def _held(records: list[RankRecord]) -> tuple[int, ...] | None:
    """Of each stage; one whose backward is whole holds nothing."""
    if not any(record.held_bytes for record in records):
        return None
    return _by_stage([dict.fromkeys(r.stage_bytes, 0) | r.held_bytes for r in records])


def _by_stage(ranks: list[dict[int, int]]) -> tuple[int, ...]:
    of_stage = {stage: size for of_rank in ranks for stage, size in of_rank.items()}
    return tuple(size for _, size in sorted(of_stage.items()))
