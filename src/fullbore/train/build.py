"""A stage with its weights, read from a model folder or drawn, and nothing of the other stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fullbore.errors import ModelError
from fullbore.train.anatomy import Anatomy
from fullbore.train.initial import draw_weights, restore_buffers
from fullbore.train.stages import Part, Stage
from fullbore.train.weight_files import WeightFiles

__all__ = ["build_stage", "empty_model"]


def empty_model(config: Any) -> Any:
    """A causal language model without memory: every weight on the meta device.

    config: a transformers configuration. Raises ModelError where there is no such model.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # the model's own code: it may raise anything
        raise ModelError(
            f"cannot build a causal language model from this configuration "
            f"(model type {getattr(config, 'model_type', None)!r}): {error}"
        ) from error
    model.tie_weights()  # not every release does that without memory
    model.config.use_cache = False
    return model


def build_stage(
    config: Any,
    anatomy: Anatomy,
    part: Part,
    *,
    weights: WeightFiles | None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Stage:
    """One stage with its own weights in memory and nothing of the others.

    weights: where to read them; None draws them from `seed`, the same for any cut. dtype: what
    they are kept in. Raises ModelError where a weight is missing or has another shape.
    """
    model = empty_model(config)
    originals = dict(model.named_modules())
    stage = Stage(model, anatomy, part)
    _allocate(model, anatomy)
    restore_buffers(model, [name for name, _ in model.named_modules()])
    if weights is None:
        _draw(model, anatomy, part, originals, seed)
    else:
        names = stage.weight_names()
        own = {names[name]: weight for name, weight in stage.named_parameters()}
        weights.read_into(own | {n: b for n, b in stage.kept_buffers().items() if n in weights})
    for weight in stage.parameters():
        weight.data = weight.data.to(dtype)  # buffers, such as rotary frequencies, stay exact
    return stage.to(device or torch.device("cpu"))


def _allocate(model: nn.Module, anatomy: Anatomy) -> None:
    """Give every weight that is left memory; two names of one weight stay one weight."""
    made: dict[str, nn.Parameter] = {}
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        source = anatomy.tied.get(name, name)
        if source not in made:
            empty = torch.full(weight.shape, float("nan"), dtype=weight.dtype)
            made[source] = nn.Parameter(empty, requires_grad=weight.requires_grad)
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._parameters[leaf] = made[source]


def _draw(
    model: nn.Module, anatomy: Anatomy, part: Part, originals: Mapping[str, nn.Module], seed: int
) -> None:
    """Draw this part's weights, and of a copy the value that its owner draws."""
    aliases = {n: w for n, w in model.named_parameters(remove_duplicate=False) if n in anatomy.tied}
    for name in reversed(list(originals)):
        if _may_own(anatomy, part, name):
            keep = [w for alias, w in aliases.items() if alias.rpartition(".")[0] == name]
            draw_weights(model, name, originals[name], seed=seed, keep=keep)
    for name, weight in aliases.items():
        source = anatomy.tied[name]
        if not part.holds(anatomy, source):
            owner, _, leaf = source.rpartition(".")
            elsewhere = originals[owner].to_empty(device="cpu", recurse=False)
            draw_weights(model, owner, elsewhere, seed=seed)
            with torch.no_grad():
                weight.copy_(elsewhere.get_parameter(leaf))
    for name, weight in model.named_parameters():
        if weight.isnan().any():
            raise ModelError(f"{anatomy.family} does not say how {name} starts: give it weights")


def _may_own(anatomy: Anatomy, part: Part, name: str) -> bool:
    """Whether a module is this part's and not one of those that the blocks sit in."""
    contains_blocks = not name or f"{anatomy.blocks}.".startswith(f"{name}.")
    return part.holds(anatomy, name) and not contains_blocks
