"""Seq1F1B: 1F1B over slices of the sequence, so that a k-th of a microbatch fills the pipeline.

    P = 2, M = 2, k = 2 (slices 0 and 1 are one sequence, 2 and 3 another)
    rank 0  F0 F1 F2 -- B1 F3 B0 -- B3 B2
    rank 1  -- F0 F1 B1 F2 B0 F3 B3 B2 --

A slice attends to the ones before it, whose keys and values its stage has kept; so slices go
forward in order and backward from the last one. What an action calls a microbatch is a slice here.
The bubble is a k-th of 1F1B's, and rank r holds P-r+k-1 slices instead of P-r microbatches. Source:
Sun et al., 2024, https://arxiv.org/abs/2406.03488, which also says how to cut slices of equal
cost; here they are taken to be equal.
"""

from __future__ import annotations

import numpy as np

from fullbore.errors import ScheduleError
from fullbore.ir import Placement, Program, Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.steady import Order, every_microbatch, one_forward_one_backward

__all__ = ["seq1f1b"]


def seq1f1b(*, ranks: int, microbatches: int, slices: int) -> Schedule:
    """Seq1F1B on P = ranks, one stage each, M = microbatches of k = slices each. Compute only.

    The schedule's `microbatches` are the Mk slices. Rank r warms up with min(P-2-r+k, Mk) forwards
    of a slice, at least. Idle a rank (P-1)(T_F+T_B)/k; rank r holds at most (P-r+k-1)/k
    microbatches. Any P, M, k >= 1; ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches)
    if slices < 1:
        raise ScheduleError(f"slices (k) is {slices}: the nearest legal value is 1")
    check_numbers(ranks=ranks, microbatches=microbatches * slices)
    return Schedule(
        name="seq1f1b",
        microbatches=microbatches * slices,
        slices=slices,
        placement=Placement.looped(ranks=ranks),
        programs=tuple(_program(rank, ranks, microbatches, slices) for rank in range(ranks)),
    )


def _program(rank: int, ranks: int, microbatches: int, slices: int) -> Program:
    forward = every_microbatch(stage=rank, microbatches=microbatches * slices)
    last_first = forward.microbatch.reshape(microbatches, slices)[:, ::-1].reshape(-1)
    return one_forward_one_backward(
        forward=forward,
        backward=Order(stage=forward.stage, microbatch=np.ascontiguousarray(last_first)),
        warmup=min(ranks - 2 - rank + slices, microbatches * slices),
    )
