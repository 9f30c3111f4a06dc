"""Hanayo: each rank has v = 2w stages, and the model runs in w waves down the ranks and up again.

    P = 3, v = 2, M = 3 (the stage on the way up in small letters; a backward takes two forwards)
    rank 0  F0 F1 F2 -- -- f0 b0 b0 f1 b1 b1 f2 b2 b2 -- -- B0 B0 -- -- B1 B1 -- -- B2 B2
    rank 1  -- F0 F1 F2 f0 -- f1 -- b0 b0 f2 b1 b1 -- B0 B0 b2 b2 B1 B1 -- -- B2 B2 -- --
    rank 2  -- -- F0 f0 F1 f1 F2 f2 -- -- b0 b0 B0 B0 b1 b1 B1 B1 b2 b2 B2 B2 -- -- -- --

Where the model turns, the next stage is on the same rank and costs no message; and the last stage
is on rank 0, which is where the first one is. A rank that is free does what is ready: a backward
before a forward, the oldest microbatch's. At most P microbatches are under way, which is as many as
fit where 1F1B fits; with M = P the bubble shrinks with w about as interleaving's does with v, with
many more microbatches it does not, so interleave those. Source: Liu et al., 2023,
https://arxiv.org/abs/2308.15762.

Which forward goes first, where several are ready, decides much. Both the stage nearest to the loss
and the one farthest from it are tried, and what ends sooner, where a backward takes two forwards,
is the schedule.
"""

from __future__ import annotations

from fullbore.errors import ScheduleError
from fullbore.ir import Action, Kind, Placement, Program, Schedule
from fullbore.schedules.numbers import check_numbers

__all__ = ["hanayo"]

_SLOTS = {Kind.F: 1, Kind.B: 2}


def hanayo(*, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Hanayo on P = ranks with v = virtual_stages each, an even number: v/2 waves. Compute only.

    No rank holds more than min(P, M) microbatches. Any P, M >= 1; ScheduleError where v is odd or
    a number is below 1.
    """
    check_numbers(ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)
    if virtual_stages % 2:
        raise ScheduleError(
            f"virtual_stages (v) is {virtual_stages}: a wave goes down the ranks and up again, so "
            f"the nearest legal values are {max(2, virtual_stages - 1)} and {virtual_stages + 1}"
        )
    placement = Placement.wave(ranks=ranks, virtual_stages=virtual_stages)
    tries = [_Waves(placement, microbatches, toward_loss=toward) for toward in (True, False)]
    best = min(tries, key=lambda waves: waves.run())
    return Schedule(
        name="hanayo",
        microbatches=microbatches,
        placement=placement,
        programs=tuple(Program.of(actions) for actions in best.actions),
    )


class _Waves:
    """Runs the pipeline slot by slot, and writes down what each rank does."""

    def __init__(self, placement: Placement, microbatches: int, *, toward_loss: bool) -> None:
        self._microbatches, self._last = microbatches, placement.stages - 1
        self._stages = [placement.stages_of(rank) for rank in range(placement.ranks)]
        if toward_loss:
            self._stages = [stages[::-1] for stages in self._stages]
        # slots in which the forwards, and the backwards, of each stage ended
        self._forwards: list[list[int]] = [[] for _ in range(placement.stages)]
        self._backwards: list[list[int]] = [[] for _ in range(placement.stages)]
        self.actions: list[list[Action]] = [[] for _ in range(placement.ranks)]

    def run(self) -> int:
        """Run to the end; returns how many slots it took."""
        free_at, slot = [0] * len(self._stages), 0
        left = 2 * self._microbatches * (self._last + 1)
        while left:
            for rank, free in enumerate(free_at):
                if free <= slot and (chosen := self._choose(rank, slot)) is not None:
                    ends = self._backwards if chosen.kind == Kind.B else self._forwards
                    free_at[rank] = slot + _SLOTS[chosen.kind]
                    ends[chosen.stage].append(free_at[rank])
                    self.actions[rank].append(chosen)
                    left -= 1
            slot += 1
        return max(free_at)

    def _choose(self, rank: int, slot: int) -> Action | None:
        backward = -1
        for stage in self._stages[rank]:
            if self._can_go_back(stage, slot) and (
                backward < 0 or len(self._backwards[stage]) < len(self._backwards[backward])
            ):
                backward = stage
        if backward >= 0:
            return Action(stage=backward, kind=Kind.B, microbatch=len(self._backwards[backward]))
        for stage in self._stages[rank]:
            if self._can_go_on(stage, slot):
                return Action(stage=stage, kind=Kind.F, microbatch=len(self._forwards[stage]))
        return None

    def _can_go_back(self, stage: int, slot: int) -> bool:
        number = len(self._backwards[stage])
        return _ended(self._forwards[stage], number, slot) and (
            stage == self._last or _ended(self._backwards[stage + 1], number, slot)
        )

    def _can_go_on(self, stage: int, slot: int) -> bool:
        number, ranks = len(self._forwards[stage]), len(self._stages)
        if number == self._microbatches:
            return False
        if stage == 0:
            return number < ranks or _ended(self._backwards[0], number - ranks, slot)
        return _ended(self._forwards[stage - 1], number, slot)


def _ended(ends: list[int], number: int, slot: int) -> bool:
    return number < len(ends) and ends[number] <= slot
