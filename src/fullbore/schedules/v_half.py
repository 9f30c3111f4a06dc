"""V-Half: two stages a rank in a V, at half of 1F1B's memory.

    P = 3, M = 3 (the stage on the way up in small letters; F, I and W equally long)
    rank 0  F0 F1 F2 -- -- f0 i0 w0 f1 i1 w1 -- I0 W0 -- f2 i2 I1 w2 W1 -- I2 W2
    rank 1  -- F0 F1 -- f0 -- f1 i0 w0 F2 -- I0 i1 W0 f2 w1 I1 i2 W1 w2 I2 W2 --
    rank 2  -- -- F0 f0 F1 f1 -- -- i0 w0 I0 W0 F2 f2 i1 I1 w1 W1 i2 I2 w2 W2 --

In the pattern a forward takes two slots a hop on the way down and one on the way up, an I of the
stage up two slots a hop and one of the stage down one. The longer a rank holds what one of its
stages keeps, the shorter it holds the other's: 6P slots for both together, on every rank, and every
six slots another microbatch. Source: Qi et al., 2024, "Pipeline Parallelism with Controllable
Memory", https://arxiv.org/abs/2405.15362; how the pattern becomes a schedule is told in
`repeated`.
"""

from __future__ import annotations

from fullbore.ir import Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.repeated import repeated

__all__ = ["v_half"]


def v_half(*, ranks: int, microbatches: int) -> Schedule:
    """V-Half on P = ranks with two stages each, M = microbatches. Compute actions only.

    At most (P+2)//2 microbatches are held. With M >= 2P, P > 2 and T_F = T_I = T_W: idle a rank
    (3P-7)T_F, or (3P-4)T_F where P is odd, of one stage. Any P, M >= 1; ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=2)
    pause = 3 if ranks % 2 == 0 else 0  # or two words would want one slot
    pattern = [
        (
            2 * rank,
            3 * ranks - 2 - rank,
            3 * ranks - 1 + pause + 2 * rank,
            6 * ranks - 2 + pause - rank,
        )
        for rank in range(ranks)
    ]
    return repeated(
        "v-half", pattern=pattern, microbatches=microbatches, most=2 * ((ranks + 2) // 2)
    )
