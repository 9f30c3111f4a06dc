"""Partitions of layers into stages: optimal, even, whole."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbore.cost.partition import partition
from fullbore.errors import CostsError


def test_a_heavy_head_takes_layers_off_the_last_stage():
    # By count it would be (4, 4, 3, 3) with 3 + 2 on the last; the optimum is 4.
    assert partition([0.1] + [1] * 12 + [3], 4) == (4, 4, 4, 2)


@pytest.mark.parametrize(
    ("items", "parts", "sizes"),
    [
        (8, 4, (2, 2, 2, 2)),
        (7, 3, (2, 2, 3)),
        (10, 4, (2, 2, 3, 3)),
        (5, 1, (5,)),
        (3, 3, (1, 1, 1)),
    ],
)
def test_equal_layers_are_spread_evenly(items, parts, sizes):
    assert partition([0.1] * items, parts) == sizes
    assert partition([0] * items, parts) == sizes


def test_among_equal_maxima_the_even_one_is_taken():
    # The first item decides the maximum; the rest must not be lumped together under it.
    assert partition([6, 1, 1, 1, 1, 1, 1], 3) == (1, 3, 3)


def test_smollm2_over_two_ranks():
    # 30 layers and a head worth 8 of them: 19 against 11 + 8.
    assert partition([0.0, *[1.0] * 30, 8.0], 2) == (20, 12)


@pytest.mark.parametrize("parts", [0, -1, 4])
def test_more_parts_than_items_are_refused(parts):
    with pytest.raises(CostsError, match="ask for 1 to 3"):
        partition([1, 1, 1], parts)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_what_is_no_cost_is_refused(cost):
    with pytest.raises(CostsError, match="item 1"):
        partition([1.0, cost], 2)


@given(st.lists(st.integers(0, 9).map(lambda n: n / 10), min_size=1, max_size=9), st.integers(1, 9))
def test_no_other_partition_is_better(costs, parts):
    parts = min(parts, len(costs))
    sizes = partition(costs, parts)
    assert sum(sizes) == len(costs)
    assert len(sizes) == parts
    assert min(sizes) >= 1
    ends = [sum(sizes[:k]) for k in range(parts + 1)]
    tenths = [round(cost * 10) for cost in costs]

    def heaviest(ends: list[int]) -> int:
        return max(sum(tenths[a:b]) for a, b in pairwise(ends))

    best = min(
        heaviest([0, *cuts, len(costs)]) for cuts in combinations(range(1, len(costs)), parts - 1)
    )
    assert heaviest(ends) == best
