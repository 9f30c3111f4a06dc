"""Eager 1F1B: 1F1B with twice the warm-up, so that messages have time to travel.

    P = 3, M = 4 (forward and backward drawn equally long)
    rank 0  F0 F1 F2 F3 -- B0 -- B1 -- B2 -- B3
    rank 1  -- F0 F1 F2 B0 F3 B1 -- B2 -- B3 --
    rank 2  -- -- F0 B0 F1 B1 F2 B2 F3 B3 -- --

In 1F1B each forward is ready just when its rank wants it, and each backward too; a hop that takes
any time at all is then waited for in every round. Here each rank has one more forward in hand for
every hop between it and the last rank. Without latency nothing is gained, and activations are held
for up to 2P-1 microbatches. Source: Zhuang et al., 2022, https://arxiv.org/abs/2211.05322.
"""

from __future__ import annotations

from fullbore.ir import Placement, Program, Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.steady import every_microbatch, one_forward_one_backward

__all__ = ["eager_1f1b"]


def eager_1f1b(*, ranks: int, microbatches: int) -> Schedule:
    """Eager 1F1B on P = ranks, one stage each, M = microbatches. Compute actions only.

    Rank r warms up with min(2(P-1-r), M) forwards. Idle a rank (P-1)(T_F+T_B); a hop of c adds
    2(P-1)c, whatever M is, as long as 2c is at most T_F+T_B. Rank r holds at most min(2(P-r)-1, M)
    microbatches. Any P, M >= 1; ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches)
    return Schedule(
        name="eager-1f1b",
        microbatches=microbatches,
        placement=Placement.looped(ranks=ranks),
        programs=tuple(_program(rank, ranks, microbatches) for rank in range(ranks)),
    )


def _program(rank: int, ranks: int, microbatches: int) -> Program:
    order = every_microbatch(stage=rank, microbatches=microbatches)
    warmup = min(2 * (ranks - 1 - rank), microbatches)
    return one_forward_one_backward(forward=order, backward=order, warmup=warmup)
