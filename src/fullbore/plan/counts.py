"""How much of a question was looked at, in numbers that add up."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(slots=True, kw_only=True)
class Counts:
    """A tally that is kept while planning.

    spreads: of the devices; of them spreads_pruned were left out whole, by a bound on every step of
    theirs, and candidates of the others were looked at: each was simulated, or is too_large, or was
    pruned by a bound of its own. simulations: all that were made, those that then improved the best
    included.
    """

    spreads: int = 0
    spreads_pruned: int = 0
    simulated: int = 0
    too_large: int = 0
    pruned: int = 0
    simulations: int = 0

    @property
    def candidates(self) -> int:
        """All of them."""
        return self.simulated + self.too_large + self.pruned
