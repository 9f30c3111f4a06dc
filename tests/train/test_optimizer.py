"""Learning rate, decay and 32-bit main weights."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from fullbore.errors import ConfigError
from fullbore.train.optimizer import Optimizer, learning_rate
from fullbore.train.settings import TrainSettings


def settings(**changes: object) -> TrainSettings:
    return TrainSettings.of({"model": "m", "data": "d", **changes})


def test_warm_up_then_cosine() -> None:
    run = settings(lr=1.0, min_lr=0.1, lr_warmup_iters=4, train_iters=24)
    rates = [learning_rate(run, step) for step in range(25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[14] == pytest.approx(0.55)  # half way
    assert rates[24] == pytest.approx(0.1)
    assert learning_rate(run, 1000) == pytest.approx(0.1)
    assert all(late <= early for early, late in pairwise(rates[4:]))


def test_without_warm_up_it_starts_at_the_peak() -> None:
    assert learning_rate(settings(lr=0.5), 0) == 0.5


def test_matrices_decay_and_vectors_do_not() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    optimizer = Optimizer({"m": [matrix], "v": [vector]}, settings(weight_decay=0.5))
    for weight in (matrix, vector):
        weight.grad = torch.zeros_like(weight)
    optimizer.step(lr=0.1)
    assert torch.allclose(matrix, torch.full((2, 2), 0.95))
    assert torch.equal(vector, torch.ones(2))
    assert matrix.grad is None and vector.grad is None


def test_small_steps_add_up_in_16_bits() -> None:
    """A step of a thousandth of the weight is lost in bf16, and is not in the main weights."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": [weight]}, settings(weight_decay=0.0))
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step(lr=1e-3)
    assert optimizer.state()["model.w"].dtype == torch.float32
    assert optimizer.state()["model.w"][0].item() == pytest.approx(0.98, abs=1e-4)
    assert weight.dtype == torch.bfloat16
    assert weight[0].item() == pytest.approx(0.98, abs=4e-3)


def test_copies_of_a_weight_go_by_one_name_and_stay_equal() -> None:
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Optimizer({"tied": [first, second]}, settings())
    state = optimizer.state()
    assert sorted(state) == [
        "model.tied",
        "optimizer.tied.exp_avg",
        "optimizer.tied.exp_avg_sq",
        "optimizer.tied.step",
    ]
    state["model.tied"].fill_(math.pi)
    state["optimizer.tied.exp_avg"].fill_(0.5)
    optimizer.load_copies()
    assert torch.equal(first, second)
    for weight in (first, second):
        weight.grad = torch.ones(3)
    optimizer.step(lr=0.1)
    assert torch.equal(first, second)
    assert first[0].item() < math.pi


def test_a_weight_without_gradient_stays() -> None:
    used, unused = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = Optimizer({"a": [used], "b": [unused]}, settings(weight_decay=0.5))
    used.grad = torch.ones(2, 2)
    optimizer.step(lr=0.1)
    assert torch.equal(unused, torch.ones(2, 2))
    assert not torch.equal(used, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("given", "meaning"),
    [
        ({}, "placed"),
        ({"recompute": "none"}, "none"),
        ({"recompute": "full"}, "full"),
        ({"recompute": "3"}, 3),
        ({"recompute_granularity": "full"}, "full"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "full"),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 2,
            },
            2,
        ),
    ],
)
def test_recomputation_in_our_words_and_in_megatrons(given: dict, meaning: object) -> None:
    assert settings(**given).recomputation == meaning


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recompute_granularity": "selective"}, "nearest legal value is full"),
        ({"recompute_granularity": "full", "recompute": "full"}, "say the same twice"),
        ({"recompute_num_layers": 2}, "need --recompute-granularity full"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "needs --recompute-num"),
        ({"recompute": "some"}, "recompute"),
        ({"recompute": "-1"}, "recompute"),
        ({"recompute": "full", "offload": 1}, "--offload has nothing to send"),
        ({"offload_ahead": 1}, "--offload-ahead says when what --offload sends"),
        ({"offload": 0}, "offload"),
    ],
)
def test_recomputation_that_makes_no_sense_is_refused(given: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**given)
