"""ZB-H1: 1F1B with a split backward, and W where 1F1B idles, at 1F1B's memory.

    P = 3, M = 4 (F, I and W equally long)
    rank 0  F0 F1 F2 -- -- I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  -- F0 F1 -- I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  -- -- F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

The rank before waits for I alone, so the cool-down takes (P-1)T_I instead of (P-1)(T_I+T_W), and
rank r, which is done with its I r hops before rank 0, keeps r W for that time. Each W that waits
holds a microbatch, so no rank holds more than the first one does. Source: Qi et al., 2023, "Zero
Bubble Pipeline Parallelism", section 2.3, https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from fullbore.ir import Placement, Program, Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.steady import every_microbatch, one_forward_one_backward, split_backwards

__all__ = ["zb_h1"]


def zb_h1(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-H1 on P = ranks, one stage each, M = microbatches. Compute actions only.

    Rank r warms up with min(P-1-r, M) forwards, and r of its I run ahead of their W. With M >= P
    and T_W at most T_F and T_I: idle a rank (P-1)(T_F+T_I-T_W); a small hop c adds 4(P-1)c where
    M >= 2P. Every rank holds at most min(P, M) microbatches. Any P, M >= 1; ScheduleError
    otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches)
    return Schedule(
        name="zb-h1",
        microbatches=microbatches,
        placement=Placement.looped(ranks=ranks),
        programs=tuple(_program(rank, ranks, microbatches) for rank in range(ranks)),
    )


def _program(rank: int, ranks: int, microbatches: int) -> Program:
    order = every_microbatch(stage=rank, microbatches=microbatches)
    warmup = min(ranks - 1 - rank, microbatches)
    whole = one_forward_one_backward(forward=order, backward=order, warmup=warmup)
    return split_backwards(whole, ahead=rank)
