"""Stages are balanced by what they cost, the head included."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import make_config

from fullbore.train.anatomy import examine
from fullbore.train.balance import PieceCosts, balance, piece_costs
from fullbore.train.build import empty_model


def costs_of(config: Any, seq_length: int = 128) -> PieceCosts:
    return piece_costs(empty_model(config), examine(empty_model(config)), seq_length=seq_length)


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    costs = PieceCosts(embedding=0.1, layers=(1.0,) * 12, head=3.0, counts="")
    assert balance(costs, stages=4) == (3, 4, 4, 1)
    assert balance(costs, stages=1) == (12,)


def test_a_head_may_be_a_stage_by_itself() -> None:
    costs = PieceCosts(embedding=0.0, layers=(1.0,) * 4, head=5.0, counts="")
    assert balance(costs, stages=5) == (1, 1, 1, 1, 0)


@pytest.mark.parametrize("stages", range(1, 32))
def test_every_stage_of_smollm2_has_something_and_all_layers_are_there(stages: int) -> None:
    config = make_config(
        "llama",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
    )
    costs = costs_of(config)
    assert costs.head / costs.layers[0] == pytest.approx(8, rel=0.05)
    layers = balance(costs, stages=stages)
    assert sum(layers) == 30
    assert min(layers[:-1], default=1) >= 1
    if stages == 2:
        assert layers == (19, 11)


def test_experts_are_counted_as_far_as_a_token_meets_them() -> None:
    few = costs_of(make_config("mixtral", num_local_experts=8, num_experts_per_tok=2))
    all_of_them = costs_of(make_config("mixtral", num_local_experts=2, num_experts_per_tok=2))
    assert few.counts == all_of_them.counts == "matrices and the causal half of attention"
    router = 2.0 * 32 * (8 - 2)
    assert few.layers[0] - all_of_them.layers[0] == pytest.approx(router)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi", "gpt_neox"])
def test_matrices_counted_in_the_model_agree_with_the_formula(family: str) -> None:
    """Both ways of counting, where both can: they differ by the attention's own products."""
    from fullbore.train.balance import _from_matrices

    config = make_config(family)
    formula = costs_of(config, seq_length=16)
    counted = _from_matrices(empty_model(config), examine(empty_model(config)))
    attention = 2 * 16 * 32
    assert [f - c for f, c in zip(formula.layers, counted.layers, strict=True)] == [attention] * 5
    assert formula.head == counted.head
