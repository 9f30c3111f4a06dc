"""Interleaved 1F1B, Megatron's: v stages a rank, taken in turn by groups of G microbatches.

    P = 2, v = 2, M = 4, G = 2 (stages 0 and 2 on rank 0, 1 and 3 on rank 1; F and B equally long)
    rank 0  0F0 0F1 2F0 2F1 | 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1  -- | 2B2  -- 2B3 0B2 0B3
    rank 1   -- 1F0 1F1 | 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 | 1B2 1B3  --

A group runs through a rank's first stage, then its second, ...; the backwards do the same from
the last stage down. The bubble is a v-th of 1F1B's, for v times as many messages and more
activations, not fewer. Sources: Narayanan et al., 2021, https://arxiv.org/abs/2104.04473;
Megatron Core's `microbatch_group_size_per_vp_stage` for G.

Megatron refuses a last group of fewer than P microbatches. Here any M runs: such a group is made
P large, and the microbatches that do not exist are then left out, which takes away nothing that
another one waits for. Wherever Megatron's own order for a short last group does not deadlock, this
is never slower, and up to a fifth faster.
"""

from __future__ import annotations

from fullbore.errors import ScheduleError
from fullbore.ir import Placement, Program, Schedule
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.steady import groups, one_forward_one_backward

__all__ = ["interleaved"]


def interleaved(
    *,
    ranks: int,
    microbatches: int,
    virtual_stages: int,
    microbatch_group_size: int | None = None,
) -> Schedule:
    """Interleaved 1F1B on P = ranks, v = virtual_stages each, M = microbatches.

    microbatch_group_size: G, at least P, by default P; more than M counts as M. Compute actions
    only, looped placement. Rank r warms up with min(2(P-1-r)+(v-1)G, Mv) forwards of one stage
    and microbatch. With G = P dividing M: idle a rank (P-1)(T_F+T_B)/v; rank r holds
    ((v-1)P+2(P-1-r)+1)/v microbatches, at most M. ScheduleError where P, v or M < 1, or G < P.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    group = ranks if microbatch_group_size is None else microbatch_group_size
    if group < ranks:
        raise ScheduleError(
            f"microbatch_group_size (G) is {group} and ranks (P) {ranks}: a group must fill the "
            f"pipeline, so the nearest legal value is {ranks}"
        )
    return Schedule(
        name="interleaved",
        microbatches=microbatches,
        placement=Placement.looped(ranks=ranks, virtual_stages=virtual_stages),
        programs=_programs(ranks, microbatches, virtual_stages, group),
    )


def _programs(
    ranks: int, microbatches: int, virtual_stages: int, group: int
) -> tuple[Program, ...]:
    """All ranks' programs: that of a full last group, less the microbatches that do not exist."""
    short = microbatches % group
    whole = microbatches - short + ranks if 0 < short < ranks else microbatches
    group = min(group, whole)
    turns = groups(microbatches=whole, virtual_stages=virtual_stages, group=group)

    def program(rank: int) -> Program:
        warmup = min(2 * (ranks - 1 - rank) + (virtual_stages - 1) * group, len(turns.chunk))
        made = one_forward_one_backward(
            forward=turns.forward(rank, ranks), backward=turns.backward(rank, ranks), warmup=warmup
        )
        return made if whole == microbatches else made.select(made.microbatch < microbatches)

    return tuple(program(rank) for rank in range(ranks))
