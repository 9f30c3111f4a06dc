"""V-Min: two stages a rank in a V, at a third of 1F1B's memory.

    P = 3, M = 3 (the stage on the way up in small letters; F, I and W equally long)
    rank 0  F0 F1 F2 -- -- f0 i0 w0 f1 -- -- I0 i1 W0 w1 f2 i2 I1 w2 W1 -- I2 W2
    rank 1  -- F0 F1 -- f0 -- f1 i0 w0 -- I0 F2 W0 i1 f2 w1 I1 i2 W1 w2 I2 W2 --
    rank 2  -- -- F0 f0 F1 f1 -- -- i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 i2 I2 w2 W2 --

In the pattern everything takes one slot a hop, which is the least that there is: a microbatch is
back after 4P slots, and six slots later comes the next one. There is no slack at all, so where F, I
and W are not equally long, every round waits and the bubble grows with M. Source: Qi et al., 2024,
"Pipeline Parallelism with Controllable Memory", https://arxiv.org/abs/2405.15362; how the pattern
becomes a schedule is told in `repeated`.
"""

from __future__ import annotations

from fullbore.ir import Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.repeated import repeated

__all__ = ["v_min"]


def v_min(*, ranks: int, microbatches: int) -> Schedule:
    """V-Min on P = ranks with two stages each, M = microbatches. Compute actions only.

    At most (P+4)//3 microbatches are held. With M >= 2P, P > 1 and T_F = T_I = T_W: idle a rank
    (4P-5)T_F, or (4P-7)T_F where 3 divides P, of one stage. Any P, M >= 1; ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=2)
    pause = 2 if ranks % 3 == 0 else 0  # or two words would want one slot
    pattern = [
        (rank, 2 * ranks - 1 - rank, 2 * ranks + pause + rank, 4 * ranks - 1 + pause - rank)
        for rank in range(ranks)
    ]
    return repeated(
        "v-min", pattern=pattern, microbatches=microbatches, most=2 * ((ranks + 4) // 3)
    )
