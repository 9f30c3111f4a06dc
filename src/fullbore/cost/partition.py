"""Cutting a row of layers into stages so that the heaviest stage is as light as possible.

Stages are balanced by cost, never by count: a head can weigh as much as eight layers. The optimum
is exact (integers inside, since sums of floats make ties look like differences); among equal
optima the most even one is taken, then the one with its larger parts last, where a pipeline holds
the fewest microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

import numpy as np
import numpy.typing as npt

from fullbore.errors import CostsError

__all__ = ["partition"]


def partition(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """How many of the items, in order, go into each of `parts` parts, every part at least one.

    Minimises the largest sum of one part. costs: one number a layer in any unit, not negative.
    Raises CostsError where there are fewer items than parts, or a cost is no cost.
    """
    if not 1 <= parts <= len(costs):
        raise CostsError(
            f"cannot cut {len(costs)} items into {parts} parts: each part needs an item, so ask "
            f"for 1 to {len(costs)}"
        )
    for item, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise CostsError(f"item {item} costs {cost}: give a finite number, 0 or more")
    ends = list(accumulate(_integers(costs if any(costs) else [1.0] * len(costs)), initial=0))
    limit = _smallest_maximum(ends, parts)
    return _most_even(ends, parts, limit)


def _integers(costs: Sequence[float]) -> list[int]:
    """The same costs in a unit that makes every one a whole number, exactly."""
    exact = [Fraction(cost) for cost in costs]
    unit = lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _smallest_maximum(ends: list[int], parts: int) -> int:
    """The least limit under which filling parts greedily needs no more than `parts`."""
    costs = [after - before for before, after in pairwise(ends)]
    low, high = max(costs), ends[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(costs, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_needed(costs: list[int], limit: int) -> int:
    needed, filled = 1, 0
    for cost in costs:
        if filled + cost > limit:
            needed, filled = needed + 1, 0
        filled += cost
    return needed


def _most_even(ends: list[int], parts: int, limit: int) -> tuple[int, ...]:
    """Of the partitions within the limit, the one with the least sum of squares."""
    square = _squares(ends, limit)
    best = square[0]
    choices = []
    for _ in range(parts - 1):
        total = best[:, None] + square
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    cuts = [len(ends) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(after - before for before, after in pairwise([0, *reversed(cuts)]))


def _squares(ends: list[int], limit: int) -> npt.NDArray[np.float64]:
    """[i, j] the squared share of the limit that items i..j-1 take, infinite where not allowed."""
    square = np.full((len(ends), len(ends)), np.inf)
    for first, before in enumerate(ends):
        for last in range(first + 1, len(ends)):
            if ends[last] - before > limit:
                break
            square[first, last] = ((ends[last] - before) / limit) ** 2
    return square
