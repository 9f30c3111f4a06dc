"""ZB-H2: ZB-H1 with twice the warm-up and twice the delay of W: no bubble for twice the memory.

    P = 3, M = 6 (F, I and W equally long)
    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 -- --
    rank 1  -- F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 --
    rank 2  -- -- F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

The picture is a parallelogram: each rank is busy from its first action to its last, but starts and
ends T_F after the one before. So it has no bubble only where ranks need not wait for each other
before the optimizer's step; where they must, each idles (P-1)T_F. Source: Qi et al., 2023, "Zero
Bubble Pipeline Parallelism", section 2.3, https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from fullbore.ir import Placement, Program, Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.steady import every_microbatch, one_forward_one_backward, split_backwards

__all__ = ["zb_h2"]


def zb_h2(*, ranks: int, microbatches: int) -> Schedule:
    """ZB-H2 on P = ranks, one stage each, M = microbatches. Compute actions only.

    Rank r warms up with min(2(P-1-r), M) forwards, and 2r of its I run ahead of their W. With
    M >= 2P and T_W at most T_F and T_I: the longest span of one rank has (P-1)(T_F+T_I-2T_W) of
    idle time, and a small hop c adds 2(P-1)c to it. Every rank holds at most min(2P-1, M)
    microbatches. Any P, M >= 1; ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches)
    return Schedule(
        name="zb-h2",
        microbatches=microbatches,
        placement=Placement.looped(ranks=ranks),
        programs=tuple(_program(rank, ranks, microbatches) for rank in range(ranks)),
    )


def _program(rank: int, ranks: int, microbatches: int) -> Program:
    order = every_microbatch(stage=rank, microbatches=microbatches)
    warmup = min(2 * (ranks - 1 - rank), microbatches)
    whole = one_forward_one_backward(forward=order, backward=order, warmup=warmup)
    return split_backwards(whole, ahead=2 * rank)
