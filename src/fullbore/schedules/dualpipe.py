"""DualPipe: microbatches enter at both ends, and each rank holds a stage of either direction.

    P = 4, M = 4 (the rank's stage nearer to the loss in small letters; B takes two slots)
    rank 0  F0 F2 -- f1 i1 w1 f3 b3 b3 B0 B0 -- -- B2 B2
    rank 1  -- F0 f1 F2 f3 b1 b1 B0 B0 b3 b3 B2 B2 -- --
    rank 2  -- F1 f0 F3 f2 b0 b0 B1 B1 b2 b2 B3 B3 -- --
    rank 3  F1 F3 -- f0 i0 w0 f2 b2 b2 B1 B1 -- -- B3 B3

Even microbatches go from rank 0 to the last one, odd ones the other way, so the model is there
twice: rank r holds stage r for the ones and stage P-1-r for the others, and the gradients of both
copies have to be summed. For that the pipeline is only half as long: ranks idle half as much as
DualPipe-V's, whose stages are half as large, and hold as much. Source: DeepSeek-AI, 2024,
https://arxiv.org/abs/2412.19437.

With fewer than 2P microbatches the schedule of 2P is taken and the others are left out.
"""

from __future__ import annotations

from fullbore.errors import ScheduleError
from fullbore.ir import Placement, Program, Schedule
from fullbore.schedules.dualpipe_phases import dualpipe_phases
from fullbore.schedules.numbers import check_numbers
from fullbore.schedules.phases import program_of

__all__ = ["dualpipe"]


def dualpipe(*, ranks: int, microbatches: int) -> Schedule:
    """DualPipe on P = ranks, an even number, M = microbatches. Compute actions only.

    The placement has two copies of the model, of P stages each. With an even M >= 2P and
    T_F = T_I = T_W: idle a rank (P/2-1)(T_F+T_I-T_W). A rank holds at most P + 1 microbatches, and
    parameters twice. Any M >= 1; ScheduleError otherwise. The runtime holds one copy of a model,
    and refuses it.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=2)
    if ranks % 2:
        raise ScheduleError(
            f"ranks (P) is {ranks}: the two directions meet between two ranks, so the nearest "
            f"legal values are {max(2, ranks - 1)} and {ranks + 1}"
        )
    each = max((microbatches + 1) // 2, ranks)
    programs = (_program(rank, ranks, each) for rank in range(ranks))
    return Schedule(
        name="dualpipe",
        microbatches=microbatches,
        placement=Placement.both_ways(ranks=ranks),
        programs=tuple(p.select(p.microbatch < microbatches) for p in programs),
    )


def _program(rank: int, ranks: int, each: int) -> Program:
    """Microbatches 0, 2, ... enter at rank 0, microbatches 1, 3, ... at the last rank."""
    outside = min(rank, ranks - 1 - rank)
    phases = dualpipe_phases(outside=outside, inside=ranks // 2 - 1 - outside, each=each)
    near, far = outside, ranks - 1 - outside
    made = program_of(phases, stages=(near, far))
    from_the_end = (made.stage == near) == (rank >= ranks // 2)
    return Program(kind=made.kind, stage=made.stage, microbatch=2 * made.microbatch + from_the_end)
