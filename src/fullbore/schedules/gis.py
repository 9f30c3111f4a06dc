"""GIS, the grouped interleaved schedule: interleaving at 1F1B's memory.

    P = 2, v = 2, M = 4, G = 2 (a rank's second stage in small letters; F, I and W equally long)
    rank 0  F0 F1 f0 f1 -- i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 -- i3 w3 I2 W2 I3 W3
    rank 1  -- F0 F1 f0 i0 w0 f1 i1 w1 F2 I0 W0 F3 I1 W1 f2 i2 w2 f3 i3 w3 I2 W2 I3 W3 --

Interleaved 1F1B warms up with two forwards for each rank behind it, because it lets a backward pass
between any two hops of a forward. Here a microbatch's forward goes on hop after hop, as in 1F1B, so
one forward for each rank is enough, and a group that has P microbatches keeps the ranks fed until
it comes around again. That is P microbatches in memory for any v. The backward is split for the
cool-down's sake, where only I goes from rank to rank. Source: Wan et al., 2025, "PipeOffload",
https://arxiv.org/abs/2503.01328.
"""

from __future__ import annotations

from fullbore.ir import Schedule
from fullbore.schedules.grouped import grouped

__all__ = ["gis"]


def gis(
    *,
    ranks: int,
    microbatches: int,
    virtual_stages: int,
    microbatch_group_size: int | None = None,
) -> Schedule:
    """GIS on P = ranks, v = virtual_stages each, M = microbatches. Compute actions only.

    microbatch_group_size: G, at least P/2, by default P. Looped placement. Rank r warms up with
    (v-1)G + P-1-r forwards of one stage and microbatch, and holds at most ((v-1)G+P-r)/v
    microbatches. With G = P dividing M: idle a rank (P-1)(T_F+T_I), of one stage. Any P, v, M >= 1;
    ScheduleError otherwise.
    """
    group = ranks if microbatch_group_size is None else microbatch_group_size
    return grouped(
        "gis", ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages, group=group
    )
