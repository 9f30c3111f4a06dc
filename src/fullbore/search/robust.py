"""The search for a schedule that is good on most steps, when times jitter.

What is fitted to some steps is not as good on others. So programs are worked on with one set of
samples, and judged, before and after the work, with another, larger one. The named schedules are
judged, too; what is found is never worse than the best of them on those samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.errors import ConfigError
from fullbore.search.arm import Arm, Start
from fullbore.search.budget import Budget
from fullbore.search.candidates import Named
from fullbore.search.harden import harden, quantile
from fullbore.search.instance import Work, work_for
from fullbore.search.race import Race
from fullbore.search.tokens import Tokens
from fullbore.sim.jitter import MOST_JITTER, factors

__all__ = ["Hardened", "Jitter", "compile_hardening", "hardened"]

Floats = npt.NDArray[np.float64]

_ENTRANTS = 4  # programs that are worked on, in turn
_JUDGING = 4  # times as many samples judge as are worked with
_MOVES = 400  # of a turn
_HOT, _COLD = 0.01, 0.001  # of the mean action's time: every move changes the quantile a little
_TURNS = 12  # from hot to cold


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """What a robust search is for: the quantile `share` over steps whose compute actions vary by
    `deviation` of their time (as in `fullbore.sim.spread`). It works with `samples` of them, and
    judges by four times as many.
    """

    deviation: float = 0.1
    samples: int = 64
    share: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.deviation <= MOST_JITTER:
            raise ConfigError(f"a jitter of {self.deviation:g}: give 0 to {MOST_JITTER:g}")
        if self.samples < 1 or not 0.0 <= self.share <= 1.0:
            raise ConfigError("a robust search takes 1 or more samples, and a share from 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardened:
    """The arm and programs with the least quantile, and the best named schedule by the same."""

    arm: Arm
    tokens: Tokens
    quantile_s: float
    named: Named | None


class _Entrant:
    """Programs under work."""

    def __init__(self, arm: Arm, tokens: Tokens, jitter: Jitter, judges: _Judges) -> None:
        self.arm, self._jitter, self._judges = arm, jitter, judges
        self._now, self.start, self.best = tokens.copy(), tokens.copy(), tokens.copy()
        self._work, self._trial = work_for(arm.instance), work_for(arm.instance)
        self.judged_s = judges.quantile_s(arm, tokens)
        self.best_s = judges.quantile_s(arm, tokens, working=True)

    def improve(self, turn: int) -> None:
        """One turn of local search; the last of the turns is the coldest."""
        arm, step = self.arm, turn % _TURNS
        if step == 0:
            self._now = self.best.copy()
        temperature_s = arm.unit_s * _HOT * (_COLD / _HOT) ** (step / (_TURNS - 1))
        self.best_s = float(
            harden(
                arm.instance,
                self._now.program,
                self._now.count,
                arm.spans,
                temperature_s,
                _MOVES,
                self._judges.factors(arm, working=True),
                self._jitter.share,
                self.best.program,
                self.best.count,
                self.best_s,
                self._work,
                self._trial,
                self._judges.work(arm),
            )
        )


class _Judges:
    """The samples of every arm: those to work with, and those to judge by."""

    def __init__(self, jitter: Jitter, seed: int) -> None:
        self._jitter, self._seed = jitter, seed
        self._drawn: dict[tuple[int, bool], Floats] = {}
        self._works: dict[int, Work] = {}

    def factors(self, arm: Arm, *, working: bool) -> Floats:
        """Factors [samples, 4, S, M] of an arm's actions."""
        key = id(arm), working
        if key not in self._drawn:
            samples = self._jitter.samples * (1 if working else _JUDGING)
            shape = (samples, 4, arm.instance.stages, arm.instance.microbatches)
            random = np.random.default_rng((self._seed, int(working)))
            self._drawn[key] = factors(random, jitter=self._jitter.deviation, shape=shape)
        return self._drawn[key]

    def work(self, arm: Arm) -> Work:
        """Scratch for an arm's samples."""
        return self._works.setdefault(id(arm), work_for(arm.instance))

    def quantile_s(self, arm: Arm, tokens: Tokens, *, working: bool = False) -> float:
        """The quantile of these programs."""
        return float(
            quantile(
                arm.instance,
                tokens.program,
                tokens.count,
                arm.spans,
                self.factors(arm, working=working),
                self._jitter.share,
                np.inf,
                self.work(arm),
            )
        )


def hardened(race: Race, jitter: Jitter, budget: Budget, *, seed: int) -> Hardened:
    """Judge all that a race has brought, and every named schedule, by the quantile; improve it."""
    judges, entrants, named = _Judges(jitter, seed), list[_Entrant](), list[Named]()
    for arm in race.arms:
        for one in arm.candidate.named:
            entrant = _Entrant(arm, one.tokens, jitter, judges)
            named.append(Named(name=one.name, tokens=one.tokens, value_s=entrant.judged_s))
            entrants.append(entrant)
        if arm.best is not None:
            entrants.append(_Entrant(arm, arm.best, jitter, judges))
    entrants += [_Entrant(arm, start.tokens, jitter, judges) for arm, start in race.finalists]
    entrants.sort(key=lambda entrant: entrant.judged_s)
    entrants = entrants[:_ENTRANTS]
    _work_on(entrants, race, budget)
    offered = [(entrant.judged_s, entrant.arm, entrant.start) for entrant in entrants]
    offered += [
        (judges.quantile_s(entrant.arm, entrant.best), entrant.arm, entrant.best)
        for entrant in entrants
    ]
    quantile_s, arm, tokens = min(offered, key=lambda offer: offer[0])
    return Hardened(
        arm=arm,
        tokens=tokens,
        quantile_s=quantile_s,
        named=min(named, key=lambda one: one.value_s, default=None),
    )


def compile_hardening(arm: Arm, start: Start) -> None:
    """Call every kernel once."""
    jitter = Jitter(samples=1)
    _Entrant(arm, start.tokens, jitter, _Judges(jitter, seed=0)).improve(0)


def _work_on(entrants: list[_Entrant], race: Race, budget: Budget) -> None:
    turn = 0
    while not budget.is_spent():
        for entrant in entrants:
            entrant.improve(turn)
            budget.spend(_MOVES, best_s=race.best.best_s, bound_s=race.bound_s)
            if budget.is_spent():
                return
        turn += 1
