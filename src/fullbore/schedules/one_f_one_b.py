"""1F1B: as many forwards as it takes to fill the pipeline, then one forward, one backward.

    P = 3, M = 4 (forward and backward drawn equally long)
    rank 0  F0 F1 F2 -- -- B0 F3 B1 -- B2 -- B3
    rank 1  -- F0 F1 -- B0 F2 B1 F3 B2 -- B3 --
    rank 2  -- -- F0 B0 F1 B1 F2 B2 F3 B3 -- --

The bubble is GPipe's, but no rank holds more than P microbatches. Source: Narayanan et al., 2021
(PipeDream-Flush), https://arxiv.org/abs/2006.09503.
"""

from __future__ import annotations

from fullbore.ir import Placement, Program, Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.steady import every_microbatch, one_forward_one_backward

__all__ = ["one_f_one_b"]


def one_f_one_b(*, ranks: int, microbatches: int) -> Schedule:
    """1F1B on P = ranks, one stage each, M = microbatches. Compute actions only.

    Rank r warms up with min(P-1-r, M) forwards. Idle a rank (P-1)(T_F+T_B); rank r holds at most
    min(P-r, M) microbatches. Any P, M >= 1; ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches)
    return Schedule(
        name="1f1b",
        microbatches=microbatches,
        placement=Placement.looped(ranks=ranks),
        programs=tuple(_program(rank, ranks, microbatches) for rank in range(ranks)),
    )


def _program(rank: int, ranks: int, microbatches: int) -> Program:
    order = every_microbatch(stage=rank, microbatches=microbatches)
    warmup = min(ranks - 1 - rank, microbatches)
    return one_forward_one_backward(forward=order, backward=order, warmup=warmup)
