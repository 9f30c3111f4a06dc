"""Language models in slices: stages cut as training cuts them, against the whole model."""

from __future__ import annotations

from typing import Any

import torch
from pipe_models import gradients
from slice_jobs import Case, counted, largest_error, text, token_sum, whole
from tiny_models import make_config

from fullbore.runtime import Pipeline
from fullbore.train.anatomy import examine
from fullbore.train.build import build_stage, empty_model
from fullbore.train.stages import Part, Stage, parts_of, shared_weights

LAYERS = {1: (5,), 2: (2, 3)}


def config_of(family: str, attention: str) -> Any:
    config = make_config(family)
    config._attn_implementation = attention
    return config


def stage_of(config: Any, part: Part, dtype: torch.dtype = torch.float64) -> Stage:
    """A stage with the weights that any cut of the model draws, large enough to matter."""
    anatomy = examine(empty_model(config))
    stage = build_stage(config, anatomy, part, weights=None, seed=3, dtype=dtype)
    with torch.no_grad():
        for weight in stage.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    return stage.train()


def compare(rank: int, families: list[tuple[str, str]], cases: list[Case]) -> dict[Any, Any]:
    """For each (family, attention) and case the largest error of any gradient, and of the loss."""
    return {
        (family, attention, case): _compare(rank, config_of(family, attention), case)
        for family, attention in families
        for case in cases
    }


def _compare(rank: int, config: Any, case: Case) -> tuple[float, float]:
    schedule = case.schedule(2)
    anatomy = examine(empty_model(config))
    parts = parts_of(anatomy, LAYERS[2])
    (alone,) = parts_of(anatomy, LAYERS[1])
    stage, twin = stage_of(config, parts[rank]), stage_of(config, alone)
    ids, targets = text(2 * case.microbatches, seed=1)
    loss, expected = whole([twin], ids, targets)
    own = twin.weight_names()
    by_name = {own[name.removeprefix("0.")]: gradient for name, gradient in expected.items()}
    with Pipeline(
        {rank: stage},
        schedule,
        token_sum,
        count_fn=counted,
        tied=shared_weights(anatomy, parts),
        recompute=case.recompute,  # type: ignore[arg-type]
    ) as pipe:
        result = pipe.step(ids, targets)
    names = stage.weight_names()
    found = {
        names[name.removeprefix("0.")]: gradient for name, gradient in gradients({0: stage}).items()
    }
    assert result.loss is not None
    return largest_error(found, by_name), abs(result.loss - loss)
