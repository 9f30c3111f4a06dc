"""DualPipe-V: DualPipe's order, folded into a V of two stages a rank.

    P = 2, M = 4 (the stage on the way up in small letters; F, I and W equally long, B = I + W)
    rank 0  F0 F1 F2 f0 i0 w0 f1 F3 b1 b1 f2 B0 B0 b2 b2 f3 -- B1 B1 b3 b3 I2 W2 I3 W3
    rank 1  -- F0 f0 F1 f1 F2 b0 b0 f2 B0 B0 F3 b1 b1 f3 B1 B1 b2 b2 B2 B2 i3 I3 w3 W3

Forward and backward of different stages take turns, so that a runtime that can may run each pair
at once and hide one's communication behind the other's work; here they run one after the other.
Backwards are split where that shortens warm-up and cool-down, and whole in between. Compared with
the bidirectional schedule each rank holds its parameters once. Source: DeepSeek-AI, 2024,
https://arxiv.org/abs/2412.19437; the fold is by Qi et al., 2025.

With fewer than 2P microbatches the schedule of 2P is taken and the others are left out.
"""

from __future__ import annotations

from fullbore.ir import Placement, Schedule
from fullbore.schedules.dualpipe_phases import dualpipe_phases
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.phases import program_of

__all__ = ["dualpipe_v"]


def dualpipe_v(*, ranks: int, microbatches: int) -> Schedule:
    """DualPipe-V on P = ranks with two stages each, M = microbatches. Compute actions only.

    With M >= 2P and T_F = T_I = T_W: idle a rank (P-1)(T_F+T_I-T_W), of one stage. A rank holds at
    most P + 1/2 microbatches. Any P, M >= 1; ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=2)
    full = max(microbatches, 2 * ranks)
    placement = Placement.v(ranks=ranks)
    programs = (
        program_of(
            dualpipe_phases(outside=rank, inside=ranks - 1 - rank, each=full),
            stages=placement.stages_of(rank),
        )
        for rank in range(ranks)
    )
    return Schedule(
        name="dualpipe-v",
        microbatches=microbatches,
        placement=placement,
        programs=tuple(p.select(p.microbatch < microbatches) for p in programs),
    )
