"""Which programs local search works on, and for how long: many for a short time, few for longer.

Two starts that differ by a thousandth in their objective may end up percents apart, and nobody
can tell which from the outside. So a generation of starts is improved for a few moves each, the
best third of them for three times as many, and so on until one is left; then comes the next
generation, from other settings, with the best so far among it. The first one begins cold, which
keeps what its starts are good for; others begin hotter, for a way out of where all of them end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fullbore.search.arm import CLOSE, Arm, Start
from fullbore.search.budget import Budget

__all__ = ["Race"]

_STARTS = 9  # of a generation, over all arms
_FEWEST = 2  # of each arm, in the first one
_MOVES = 12  # of the first heat of a generation, for each token ...
_TOKEN_MOVES = 240_000_000  # ... and at most so many times tokens: a move takes longer with them
_GROWN = 80  # moves for each time that programs are cut and grow anew
_FEWEST_GROWN = 20
_HOT = (0.05, 0.3, 0.15)  # the first temperature of each generation in turn, of the mean action
_EXPLORING = 0.12  # share of the budget that goes to list schedules first


class Race:
    """A search over arms, within a budget."""

    def __init__(
        self,
        arms: Sequence[Arm],
        budget: Budget,
        random: np.random.Generator,
        *,
        begin: float = 0.0,
        until: float = 1.0,
        told_s: float | None = None,
    ) -> None:
        """begin, until: the shares of the budget between which the race runs. told_s: what is told
        as the best so far, where the race's own best is not what is looked for.
        """
        self.arms, self._budget, self._random = arms, budget, random
        self._begin, self._until, self._told_s = begin, until, told_s
        self.finalists: list[tuple[Arm, Start]] = []

    @property
    def best(self) -> Arm:
        """The arm with the best programs."""
        return min(self.arms, key=lambda arm: arm.best_s)

    @property
    def bound_s(self) -> float:
        """What no schedule of any arm can be below."""
        return min(arm.bound_s for arm in self.arms)

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the race's budget is spent, or nothing is left to be gained."""
        if self._budget.is_spent(self._begin + share * (self._until - self._begin)):
            return True
        return self.best.best_s <= self.bound_s * (1 + CLOSE)

    def _spend(self, moves: int) -> None:
        best_s = self.best.best_s if self._told_s is None else self._told_s
        self._budget.spend(moves, best_s=best_s, bound_s=self.bound_s)

    def begin(self) -> None:
        """One round of list schedules, whatever is left of the budget."""
        for arm in self.open_arms:
            self._spend(arm.explore(self._random))

    def run(self) -> None:
        """Search until the budget is spent, or nothing is left to be gained."""
        generation = 0
        while not self.is_over():
            self._explore(generation)
            self._heats(generation)
            generation += 1

    @property
    def open_arms(self) -> list[Arm]:
        """The arms that may still have something better."""
        return [arm for arm in self.arms if arm.bound_s * (1 + CLOSE) < self.best.best_s]

    def _explore(self, generation: int) -> None:
        """List schedules and steady flows for every arm; a few rounds, fewer later."""
        rounds = 10 if generation == 0 else 2
        for _ in range(rounds):
            for arm in self.open_arms:
                self._spend(arm.explore(self._random))
                self._spend(arm.settle())
                if self.is_over(_EXPLORING if generation == 0 else 1.0):
                    return

    def _heats(self, generation: int) -> None:
        entrants = self._entrants(generation)
        size = max(300, max((arm.size for arm, _ in entrants), default=0))
        moves = min(_MOVES * size, _TOKEN_MOVES // size)
        while entrants and not self.is_over():
            for arm, start in entrants:
                self._cool(arm, start, moves, _HOT[generation % len(_HOT)])
                self._remember(arm, start)
                if self.is_over():
                    return
            entrants.sort(key=lambda entrant: entrant[1].value_s)
            entrants = entrants[: len(entrants) // 3]
            moves *= 3

    def _remember(self, arm: Arm, start: Start) -> None:
        """Keep the best programs that heats have ended with, of different objectives."""
        if all(start.value_s != other.value_s for _, other in self.finalists):
            kept = Start(tokens=start.tokens.copy(), value_s=start.value_s)
            self.finalists.append((arm, kept))
            self.finalists.sort(key=lambda finalist: finalist[1].value_s)
            del self.finalists[_STARTS:]

    def _entrants(self, generation: int) -> list[tuple[Arm, Start]]:
        """The starts of a generation: the best of all, but some of every arm, more at first."""
        offered = [(arm, arm.starts(_STARTS)) for arm in self.open_arms]
        fewest = _FEWEST if generation == 0 else 1
        chosen = [(arm, start) for arm, starts in offered for start in starts[:fewest]]
        others = [(arm, start) for arm, starts in offered for start in starts[fewest:]]
        others.sort(key=lambda entrant: entrant[1].value_s)
        chosen += others[: max(0, _STARTS - len(chosen))]
        best = self.best
        if generation > 0 and best.best is not None:
            chosen.append((best, Start(tokens=best.best.copy(), value_s=best.best_s)))
        return chosen

    def _cool(self, arm: Arm, start: Start, moves: int, hot: float) -> None:
        """Grow anew, then a round of local search from hot to cold."""
        left = max(_FEWEST_GROWN, moves // _GROWN)
        while left > 0:
            settings = min(left, arm.round)
            self._spend(arm.regrow(start, self._random, settings))
            left -= settings
            if self.is_over() or arm.is_done:
                return
        now = start.tokens.copy()
        for step in arm.steps():
            arm.cool(start, now, step, moves, hot)
            self._spend(max(1, moves // len(arm.steps())))
            if self.is_over() or arm.is_done:
                return
