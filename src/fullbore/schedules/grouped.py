"""Interleaving in groups of G with one extra forward a rank and not two: what GIS and GIS-H share.

Megatron's interleaving lets a forward and a backward pass between two hops of the same
microbatch. Where forwards follow each other hop by hop, as in 1F1B, rank r needs P-1-r forwards of
a group's last stage in hand, not 2(P-1-r). Only that count differs, and the split backward.
"""

from __future__ import annotations

from fullbore.errors import ScheduleError
from fullbore.ir import Placement, Program, Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.steady import groups, one_forward_one_backward, split_backwards

__all__ = ["grouped"]


def grouped(
    name: str, *, ranks: int, microbatches: int, virtual_stages: int, group: int
) -> Schedule:
    """Rank r warms up with (v-1)G + P-1-r forwards of one stage and microbatch; each W follows
    its I. Looped placement. ScheduleError where a number is below 1 or 2G below P.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    least = (ranks + 1) // 2
    if group < least:
        raise ScheduleError(
            f"microbatch_group_size (G) is {group} and ranks (P) {ranks}: two groups must fill the "
            f"pipeline, so the nearest legal value is {least}"
        )
    padded = -(-microbatches // group) * group
    turns = groups(microbatches=padded, virtual_stages=virtual_stages, group=group)

    def program(rank: int) -> Program:
        warmup = min((virtual_stages - 1) * group + ranks - 1 - rank, len(turns.chunk))
        whole = one_forward_one_backward(
            forward=turns.forward(rank, ranks), backward=turns.backward(rank, ranks), warmup=warmup
        )
        if padded != microbatches:
            whole = whole.select(whole.microbatch < microbatches)
        return split_backwards(whole, ahead=0)

    return Schedule(
        name=name,
        microbatches=microbatches,
        placement=Placement.looped(ranks=ranks, virtual_stages=virtual_stages),
        programs=tuple(program(rank) for rank in range(ranks)),
    )
