"""GPipe: all forwards, then all backwards.

    P = 3, M = 3
    rank 0  F0 F1 F2 -- -- -- -- B0 B1 B2
    rank 1  -- F0 F1 F2 -- -- B0 B1 B2 --       (forward and backward drawn equally long)
    rank 2  -- -- F0 F1 F2 B0 B1 B2 -- --

Backwards run in the order of the forwards, so that gradients are added up in the order in which
one process would add them. Source: Huang et al., 2019, https://arxiv.org/abs/1811.06965.
"""

from __future__ import annotations

from fullbore.ir import Schedule
from fullbore.schedules.breadth_first import breadth_first
from fullbore.schedules.numbers import check_numbers

__all__ = ["gpipe"]


def gpipe(*, ranks: int, microbatches: int) -> Schedule:
    """GPipe on P = ranks, one stage each, M = microbatches. Compute actions only.

    Idle a rank (P-1)(T_F+T_B); peak activations M on every rank. Any P, M >= 1; ScheduleError
    otherwise.
    """
    check_numbers(ranks=ranks, microbatches=microbatches)
    return breadth_first("gpipe", ranks=ranks, microbatches=microbatches, virtual_stages=1)
