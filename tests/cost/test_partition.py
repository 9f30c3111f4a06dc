"""Partitions of layers into stages: optimal, even, whole."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbore.cost.partition import partition, partition_within, within
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


LISTED = [0.1, *[1.0] * 12, 3.0]


def slowest(costs, sizes):
    ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return max(sum(costs[a:b]) for a, b in pairwise(ends))


def all_partitions(items, parts):
    for cuts in combinations(range(1, items), parts - 1):
        yield tuple(b - a for a, b in pairwise([0, *cuts, items]))


def test_a_limit_on_memory_moves_layers_to_where_there_is_room():
    # The first ranks hold more microbatches, as in 1F1B: 4, 3, 2, 1 a layer.
    held = [
        [live * (0.0 if item in (0, 13) else 1.0) for item in range(14)] for live in (4, 3, 2, 1)
    ]
    assert partition(LISTED, 4) == partition_within(LISTED, within(held, [16] * 4)) == (4, 4, 4, 2)
    tight = partition_within(LISTED, within(held, [9] * 4))
    assert tight == (3, 3, 4, 4)
    assert slowest(LISTED, tight) == min(
        slowest(LISTED, sizes)
        for sizes in all_partitions(14, 4)
        if sizes[0] - 1 <= 2 and sizes[1] <= 3 and sizes[2] <= 4
    )


def test_where_nothing_fits_there_is_no_partition():
    assert partition_within([1, 1, 1], within([[1, 1, 1]] * 2, [1, 1])) is None


@given(st.data())
def test_no_other_partition_within_limits_is_better(data):
    tenths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    costs = [tenth / 10 for tenth in tenths]
    parts = data.draw(st.integers(1, len(costs)))
    amounts = data.draw(
        st.lists(
            st.lists(st.integers(0, 5), min_size=len(costs), max_size=len(costs)),
            min_size=parts,
            max_size=parts,
        )
    )
    limits = data.draw(st.lists(st.integers(0, 12), min_size=parts, max_size=parts))

    def fits(sizes):
        ends = [sum(sizes[:k]) for k in range(parts + 1)]
        return all(sum(amounts[k][a:b]) <= limits[k] for k, (a, b) in enumerate(pairwise(ends)))

    allowed = [sizes for sizes in all_partitions(len(costs), parts) if fits(sizes)]
    found = partition_within(costs, within(amounts, limits))
    if not allowed:
        assert found is None
        return
    assert found in allowed
    assert slowest(tenths, found) == min(slowest(tenths, sizes) for sizes in allowed)
