"""Looped breadth-first: v stages a rank, each stage's microbatches all at once.

    P = 2, v = 2, M = 2 (stages 0 and 2 on rank 0, 1 and 3 on rank 1)
    rank 0  0F0 0F1 2F0 2F1  --  --  2B0 2B1 0B0 0B1
    rank 1   -- 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1  --

Every stage's weights are used in one stretch forward and one backward, which is what sharded
data parallelism wants; activations pile up as in GPipe. PyTorch's version takes the microbatches
backwards in reverse; here they run in order, so that gradients are added up in the order in
which one process would add them. Source: Lamy-Poirier, 2022, https://arxiv.org/abs/2211.05953.
"""

from __future__ import annotations

from fullbore.ir import Schedule
from fullbore.schedules.breadth_first import breadth_first
from fullbore.schedules.numbers import check_numbers

__all__ = ["looped_bfs"]


def looped_bfs(*, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Looped BFS on P = ranks, v = virtual_stages each, M = microbatches. Compute actions only.

    Idle a rank (P-1)(T_F+T_B)/v with M >= P; peak activations M on every rank. Any P, v, M >= 1;
    ScheduleError otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    return breadth_first(
        "looped-bfs", ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages
    )
