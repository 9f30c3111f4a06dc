"""ZB-V: two stages a rank in a V, and no bubble at 1F1B's memory.

    P = 2, M = 4 (the stage on the way up in small letters; F, I and W equally long)
    rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 --
    rank 1  -- F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

First and last stage share rank 0, so that it begins its first backward as soon as its forward has
gone down the V and up again, and every rank holds the same. As in ZB-H2 each rank is busy from its
first action to its last, but starts and ends T_F after the one before. The phases are those that
the paper draws for T_F = T_I = T_W; other costs want another order, which `fullbore search` finds.
Source: Qi et al., 2023, "Zero Bubble Pipeline Parallelism", section 6,
https://arxiv.org/abs/2401.10241, and 2024, https://arxiv.org/abs/2405.15362.

With fewer than 2P microbatches the schedule of 2P is taken and the others are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from fullbore.ir import Placement, Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.phases import Phase, program_of

__all__ = ["zb_v"]


def zb_v(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-V on P = ranks with two stages each, M = microbatches. Compute actions only.

    With M >= 2P and T_F = T_I = T_W: no idle time within a rank's span, (P-1)T_F of one stage in
    the step; every rank holds P microbatches. Any P, M >= 1; ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=2)
    full = max(microbatches, 2 * ranks)
    placement = Placement.v(ranks=ranks)
    programs = (
        program_of(_phases(rank, ranks, full), stages=placement.stages_of(rank))
        for rank in range(ranks)
    )
    return Schedule(
        name="zb-v",
        microbatches=microbatches,
        placement=placement,
        programs=tuple(p.select(p.microbatch < microbatches) for p in programs),
    )


def _phases(rank: int, ranks: int, microbatches: int) -> Iterator[Phase]:
    """For M >= 2P; stage 0 is the one on the way down the V, stage 1 that on the way up."""
    below = ranks - 1 - rank  # ranks nearer to the tip of the V
    yield Phase("F0", 2 * below + 1)
    yield Phase("F1 F0", rank)
    yield Phase("F1 I1 W", below + 1)
    yield Phase("F0 I0 W F1 I1 W", microbatches - 2 * ranks + rank + 1)
    yield Phase("I0 W F1 I1 W", below)
    yield Phase("I0 I1", rank)
    yield Phase("I0 W", below + 1)
    yield Phase("W", 2 * rank)
