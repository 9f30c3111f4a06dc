"""Costs of another number of stages: split evenly, joined, or refused."""

from __future__ import annotations

import pytest

from fullbore.cost import Costs
from fullbore.cost.recut import recut
from fullbore.errors import CostsError

FOUR = Costs.parse(
    {
        "stages": [
            {"forward_s": 1, "backward_s": 2, "activation_bytes": 10},
            {"forward_s": 2, "backward_s": 4, "activation_bytes": 20},
            {"forward_s": 3, "input_grad_s": 3, "weight_grad_s": 3, "activation_bytes": 30},
            {"forward_s": 4, "backward_s": 8},
        ],
        "hop_s": 0.5,
        "message_bytes": 64,
    }
)


def values(costs: Costs, name: str) -> list[float | None]:
    return [getattr(stage, name) for stage in costs.stages]


def test_neighbours_are_joined():
    two = recut(FOUR, stages=2)
    assert values(two, "forward_s") == [3, 7]
    assert values(two, "backward_s") == [6, 14]
    assert values(two, "activation_bytes") == [30, None]  # one of the last two does not say
    assert values(two, "input_grad_s") == [None, None]
    assert (two.hop_s, two.message_bytes) == (0.5, 64)


def test_stages_are_split_evenly():
    eight = recut(FOUR, stages=8)
    assert values(eight, "forward_s") == [0.5, 0.5, 1, 1, 1.5, 1.5, 2, 2]
    assert values(eight, "weight_grad_s")[3:6] == [None, 1.5, 1.5]
    assert recut(eight, stages=4) == FOUR


def test_the_same_number_changes_nothing():
    assert recut(FOUR, stages=4) == FOUR


@pytest.mark.parametrize("stages, legal", [(3, "2 and 4"), (6, "4 and 8"), (0, "1 and 2")])
def test_other_numbers_are_refused_with_the_nearest_legal_ones(stages, legal):
    with pytest.raises(CostsError, match=f"of 4 stages .* for {stages}: .* {legal}$"):
        recut(FOUR, stages=stages)
