"""How long a search may take, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from fullbore.errors import ConfigError

__all__ = ["Budget", "Limits", "Progress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop: after so many seconds, or moves (a list schedule counts as eight)."""

    time_s: float | None = 10.0
    moves: int | None = None
    stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        if self.time_s is not None and not self.time_s >= 0:  # nor is it a number
            raise ConfigError(f"a time limit of {self.time_s:g} s: give 0 or more")
        if self.moves is not None and self.moves < 0:
            raise ConfigError(f"a limit of {self.moves} moves: give 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is: seconds and moves spent, best objective and bound, both in seconds."""

    elapsed_s: float
    moves: int
    best_s: float
    bound_s: float


class Budget:
    """What is spent of the limits; tells whoever asked for it how the search goes."""

    def __init__(self, limits: Limits, report: Callable[[Progress], None]) -> None:
        self._limits, self._report = limits, report
        self._began_s = time.monotonic()
        self.moves = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began_s

    def is_stopped(self) -> bool:
        """Whether somebody wants the search to end, whatever is left of it."""
        return self._limits.stop()

    def is_spent(self, share: float = 1.0) -> bool:
        """Whether this share of the time or of the moves is spent, or the search is stopped."""
        limits = self._limits
        if limits.time_s is not None and self.elapsed_s >= share * limits.time_s:
            return True
        if limits.moves is not None and self.moves >= share * limits.moves:
            return True
        return self.is_stopped()

    def spend(self, moves: int, *, best_s: float, bound_s: float) -> None:
        """Count moves, and tell of it."""
        self.moves += moves
        self._report(
            Progress(elapsed_s=self.elapsed_s, moves=self.moves, best_s=best_s, bound_s=bound_s)
        )
