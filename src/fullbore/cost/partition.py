"""Cutting a row of layers into stages so that the heaviest stage is as light as possible.

Stages are balanced by cost, never by count: a head can weigh as much as eight layers. The optimum
is exact (integers inside, since sums of floats make ties look like differences); among equal
optima the most even one is taken, then the one with its larger parts last, where a pipeline holds
the fewest microbatches. What a part may hold of something else, such as bytes, can be limited.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import isfinite, lcm

import numpy as np
import numpy.typing as npt

from fullbore.errors import CostsError

__all__ = ["Reach", "partition", "partition_within", "within"]

# For each part [k] and first item [i], up to which item the part can go: i itself where it can take
# none. What may be a part must be one if items are taken off its end.
Reach = Sequence[Sequence[int]]


def partition(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """How many of the items, in order, go into each of `parts` parts, every part at least one.

    Minimises the largest sum of one part, exactly. costs: one number a layer in any unit, not
    negative. Raises CostsError where there are fewer items than parts, or a cost is no cost.
    """
    ends = _ends(costs, parts)
    return _most_even(ends, parts, _smallest_maximum(ends, parts))


def partition_within(costs: Sequence[float], reach: Reach) -> tuple[int, ...] | None:
    """The same among the partitions whose every part is within reach, exactly; None if none is.

    reach: of each part, such as `within` makes it.
    """
    ends = _ends(costs, len(reach))
    limit = _smallest_limited(ends, reach)
    return None if limit is None else _most_even(ends, len(reach), limit, reach)


def _ends(costs: Sequence[float], parts: int) -> list[int]:
    """Where each item ends, in a unit that makes every cost whole; refuses what is no cost."""
    if not 1 <= parts <= len(costs):
        raise CostsError(
            f"cannot cut {len(costs)} items into {parts} parts: each part needs an item, so ask "
            f"for 1 to {len(costs)}"
        )
    for item, cost in enumerate(costs):
        if not isfinite(cost) or cost < 0:
            raise CostsError(f"item {item} costs {cost}: give a finite number, 0 or more")
    return list(accumulate(_integers(costs if any(costs) else [1.0] * len(costs)), initial=0))


def within(amounts: Sequence[Sequence[float]], limits: Sequence[float]) -> Reach:
    """How far parts can go whose sums of a second quantity stay within limits, exactly.

    amounts: for each part, what each item would take there, not negative (a layer's activations
    weigh more on a rank that holds more microbatches). limits: of each part.
    """
    return [_row(row, limit) for row, limit in zip(amounts, limits, strict=True)]


def _row(amounts: Sequence[float], limit: float) -> list[int]:
    exact, most = [Fraction(amount) for amount in amounts], Fraction(limit)
    row, end, held = [], 0, Fraction(0)
    for first in range(len(exact)):
        end = max(end, first)
        while end < len(exact) and held + exact[end] <= most:
            held, end = held + exact[end], end + 1
        row.append(end)
        if end > first:
            held -= exact[first]
    return row


def _smallest_limited(ends: list[int], reach: Reach) -> int | None:
    """The least limit under which the parts can be filled; None where there is none.

    Only sums of neighbouring items can be that limit. Where a part may end is not an interval: an
    item may be too large for one part and not for the next.
    """
    sums = sorted({b - a for at, a in enumerate(ends) for b in ends[at + 1 :]})
    low, high = 0, len(sums) - 1
    if not _can_fill(ends, reach, sums[high]):
        return None
    while low < high:
        middle = (low + high) // 2
        if _can_fill(ends, reach, sums[middle]):
            high = middle
        else:
            low = middle + 1
    return sums[low]


def _can_fill(ends: list[int], reach: Reach, limit: int) -> bool:
    items = len(ends) - 1
    starts = {0}
    for row in reach:
        last = -1
        after: set[int] = set()
        for first in sorted(starts):
            if first == items:
                continue
            end = row[first]
            while ends[end] - ends[first] > limit:
                end -= 1
            after.update(range(max(first, last) + 1, end + 1))
            last = max(last, end)
        starts = after
    return items in starts


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


def _most_even(
    ends: list[int], parts: int, limit: int, reach: Reach | None = None
) -> tuple[int, ...]:
    """Of the partitions within the limit, the one with the least sum of squares."""
    square = _squares(ends, limit)
    best = _reached(square, reach, 0)[0]
    choices = []
    for part in range(1, parts):
        total = best[:, None] + _reached(square, reach, part)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    cuts = [len(ends) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(after - before for before, after in pairwise([0, *reversed(cuts)]))


def _reached(
    square: npt.NDArray[np.float64], reach: Reach | None, part: int
) -> npt.NDArray[np.float64]:
    """The squares, infinite where the part cannot go so far."""
    if reach is None:
        return square
    furthest = np.append(reach[part], 0)
    return np.where(np.arange(len(square))[None, :] <= furthest[:, None], square, np.inf)


def _squares(ends: list[int], limit: int) -> npt.NDArray[np.float64]:
    """[i, j] the squared share of the limit that items i..j-1 take, infinite where not allowed."""
    square = np.full((len(ends), len(ends)), np.inf)
    for first, before in enumerate(ends):
        for last in range(first + 1, len(ends)):
            if ends[last] - before > limit:
                break
            square[first, last] = ((ends[last] - before) / limit) ** 2
    return square
