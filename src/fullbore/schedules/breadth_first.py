"""Stage by stage, every microbatch each: what GPipe and looped BFS share."""

from __future__ import annotations

import numpy as np

from fullbore.ir import Kind, Placement, Program, Schedule

__all__ = ["breadth_first"]


def breadth_first(name: str, *, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """All forwards of a rank's first stage, of its second, ..., then all backwards, last stage
    first; microbatches in order throughout. Looped placement.
    """
    placement = Placement.looped(ranks=ranks, virtual_stages=virtual_stages)
    half = virtual_stages * microbatches
    chunk = np.arange(half, dtype=np.int32) // microbatches
    chunks = np.concatenate([chunk, virtual_stages - 1 - chunk])
    kind = np.repeat([np.int8(Kind.F), np.int8(Kind.B)], half)
    microbatch = np.arange(2 * half, dtype=np.int32) % np.int32(microbatches)
    stage = chunks * np.int32(ranks)
    return Schedule(
        name=name,
        microbatches=microbatches,
        placement=placement,
        programs=tuple(
            Program(kind=kind, stage=stage + np.int32(rank), microbatch=microbatch)
            for rank in range(ranks)
        ),
    )
