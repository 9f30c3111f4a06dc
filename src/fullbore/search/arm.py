"""One placement under search: what was tried on it, and its best programs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.search.bound import lower_bound
from fullbore.search.candidates import Candidate, evaluated
from fullbore.search.explore import Flow, draw, explore, flow_of, mutate
from fullbore.search.improve import anneal
from fullbore.search.instance import Work, work_for
from fullbore.search.pattern import repeated, settle
from fullbore.search.regrow import regrow
from fullbore.search.tokens import Tokens

__all__ = ["CLOSE", "Arm", "Start"]

Floats = npt.NDArray[np.float64]

CLOSE = 1e-9
"""This close to the bound, as a share, a schedule is as good as it can be."""

_SETTINGS = 200  # list schedules tried at a time ...
_FEWEST = 8
_TOKENS = 1_000_000  # ... and no more than make about so many tokens, which takes half a second
_FRESH = 0.3  # share of the rounds in which settings are drawn anew to regrow programs
_KEPT = 40  # settings that are remembered
_WAITS = 4000  # waits tried for a steady flow
_STRETCHES = (1.0, 1.3, 1.03, 1.15, 1.08, 1.2, 1.5, 1.25, 2.0)  # of its period
_COLD = 0.003  # the last temperature, of the mean action's time
_STEPS = 20  # temperatures from hot to cold


@dataclass(slots=True, kw_only=True)
class Start:
    """Programs that local search starts from, and then the best that came of them."""

    tokens: Tokens
    value_s: float


class Arm:
    """A candidate, its bound, the best programs for it, and where to start from."""

    def __init__(self, candidate: Candidate, *, spans: bool) -> None:
        instance = candidate.instance
        self.candidate, self.instance, self.spans = candidate, instance, spans
        self.flow: Flow = flow_of(instance)
        self.bound_s = lower_bound(instance, spans=spans)
        self.best: Tokens | None = None
        self.best_s = math.inf
        self._work: Work = work_for(instance)
        self._trial: Work = work_for(instance)
        self._starts: dict[str, Start] = {}
        self._settings, self._values = draw(np.random.default_rng(0), 0), np.zeros(0)
        self._stretches = list(_STRETCHES)
        positive = instance.duration_s[instance.duration_s > 0]
        self.unit_s = float(positive.mean()) if len(positive) else 1.0
        for one in candidate.named[:1]:
            self.take("named", one.tokens, one.value_s)

    @property
    def is_done(self) -> bool:
        """Whether nothing better can be found here."""
        return self.best_s <= self.bound_s * (1 + CLOSE)

    @property
    def size(self) -> int:
        """Tokens of a split program of all ranks."""
        return 3 * self.instance.stages * self.instance.microbatches

    @property
    def round(self) -> int:
        """List schedules to try at a time, so that nobody waits long for them."""
        return min(_SETTINGS, max(_FEWEST, _TOKENS // self.size))

    def take(self, source: str, tokens: Tokens, value_s: float) -> None:
        """Keep these programs if they are better than all, or than all from this source."""
        if source not in self._starts or value_s < self._starts[source].value_s:
            self._starts[source] = Start(tokens=tokens.copy(), value_s=value_s)
        if value_s < self.best_s:
            self.best, self.best_s = tokens.copy(), value_s

    def explore(self, random: np.random.Generator) -> int:
        """Try list schedules, at random or near the best settings; the moves that it counts as."""
        drawn = self._drawn(random, self.round, fresh=0.1)
        made = Tokens.empty(self.instance)
        values = explore(self.instance, self.flow, drawn, self._work, spans=self.spans, best=made)
        if math.isfinite(values.min()):
            self.take("list", made, float(values.min()))
        settings = np.concatenate([self._settings, drawn])
        values = np.concatenate([self._values, values])
        _, first = np.unique(np.round(values / self.unit_s, 6), return_index=True)
        chosen = first[np.isfinite(values[first])][:_KEPT]
        self._settings, self._values = np.ascontiguousarray(settings[chosen]), values[chosen]
        return 8 * self.round

    def _drawn(self, random: np.random.Generator, settings: int, *, fresh: float) -> Floats:
        """Settings [n, D] near the best ones; in this share of the cases, new ones."""
        if len(self._settings) == 0 or random.random() < fresh:
            return draw(random, settings)
        return mutate(random, self._settings[:12], settings)

    def settle(self) -> int:
        """Look for a steady flow with the next period; the moves that it counts as."""
        if not self._stretches or self.flow.period_s == 0.0:
            return 0
        instance, period_s = self.instance, self.flow.period_s * self._stretches.pop(0)
        waits_s, times_s = np.zeros((3, instance.stages)), np.zeros((3, instance.stages))
        chunk = self.flow.chunk.astype(np.int64)
        moves = max(200, _WAITS * 32 // max(32, instance.stages))
        if settle(instance, period_s, chunk, waits_s, times_s, moves) <= 0.0:
            made = repeated(instance, times_s, period_s)
            value_s = evaluated(instance, made, spans=self.spans)
            if value_s is not None:
                self.take("flow", made, value_s)
        return moves

    def starts(self, most: int) -> list[Start]:
        """The best programs of each source, and those of the best settings; copies, best first."""
        made = [
            Start(tokens=one.tokens.copy(), value_s=one.value_s) for one in self._starts.values()
        ]
        for number in range(1, min(most, len(self._settings))):
            tokens = Tokens.empty(self.instance)
            setting = self._settings[number : number + 1]
            values = explore(
                self.instance, self.flow, setting, self._work, spans=self.spans, best=tokens
            )
            made.append(Start(tokens=tokens, value_s=float(values[0])))
        made.sort(key=lambda start: start.value_s)
        return made[:most]

    def regrow(self, start: Start, random: np.random.Generator, settings: int) -> int:
        """Cut the programs of a start, and let them grow anew; the moves that it counts as."""
        drawn = self._drawn(random, settings, fresh=_FRESH)
        start.value_s = float(
            regrow(
                self.instance,
                self.flow.chain_s,
                self.flow.chunk,
                self.flow.period_s,
                drawn,
                self.spans,
                start.tokens.program,
                start.tokens.count,
                self.bound_s * (1 + CLOSE),
                self._work,
                self._trial,
            )
        )
        self._keep(start)
        return 8 * settings

    def _keep(self, start: Start) -> None:
        if start.value_s < self.best_s:
            self.best, self.best_s = start.tokens.copy(), start.value_s

    def cool(self, start: Start, now: Tokens, step: int, moves: int, hot: float = 0.05) -> None:
        """One of STEPS temperatures of a round of local search, which stands at `now`.

        hot: the first of them, of the mean action's time.
        """
        temperature_s = self.unit_s * hot * (_COLD / hot) ** (step / (_STEPS - 1))
        start.value_s = float(
            anneal(
                self.instance,
                now.program,
                now.count,
                self.spans,
                temperature_s,
                max(1, moves // _STEPS),
                self.bound_s * (1 + CLOSE),
                start.tokens.program,
                start.tokens.count,
                start.value_s,
                self._work,
                self._trial,
            )
        )
        self._keep(start)

    @staticmethod
    def steps() -> range:
        """The temperatures of a round, by number."""
        return range(_STEPS)
