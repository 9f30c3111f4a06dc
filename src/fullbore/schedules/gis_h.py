"""GIS-H, the grouped interleaved schedule at half of the memory: groups of half the pipeline.

    P = 4, v = 2, M = 2, G = 2 (a rank's second stage in small letters; F, I and W equally long)
    rank 0  F0 F1 -- -- f0 f1 -- -- -- -- -- i0 w0 -- i1 w1 I0 W0 I1 W1
    rank 1  -- F0 F1 -- -- f0 f1 -- -- -- i0 w0 -- i1 w1 I0 W0 I1 W1 --
    rank 2  -- -- F0 F1 -- -- f0 f1 -- i0 w0 -- i1 w1 I0 W0 I1 W1 -- --
    rank 3  -- -- -- F0 F1 -- -- f0 i0 w0 f1 i1 w1 I0 W0 I1 W1 -- -- --

A group of P/2 microbatches has come around on its way back only after 2P hops, for which its ranks
have work for 3P/2: they idle P/2 slots for each stage but one. Once they have, forwards and
backwards fit into each other and the steady phase has no bubble, where F, I and W are equally long.
Source: Wan et al., 2025, "PipeOffload", https://arxiv.org/abs/2503.01328.
"""

from __future__ import annotations

from fullbore.ir import Schedule
from fullbore.schedules.grouped import grouped

__all__ = ["gis_h"]


def gis_h(*, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """GIS-H on P = ranks, v = virtual_stages each, M = microbatches. Compute actions only.

    Groups of G = (P+1)//2. Looped placement. Rank r holds at most ((v-1)G+P-r)/v microbatches. With
    G dividing M and T_F = T_I = T_W: idle a rank (2(P-1) + (v-1)(P//2))T_F, of one stage. Any P, v,
    M >= 1; ScheduleError otherwise.
    """
    return grouped(
        "gis-h",
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        group=(ranks + 1) // 2,
    )
