"""Keys and values that a stage of a language model carries from slice to slice of a sequence.

They travel as plain tensors, and go in and out of the model in its own cache, so that positions,
masks and what attention does with them stay the model's business. Every layer's cache keeps all
tokens, those of sliding windows too: the masks see to the window.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fullbore.errors import ModelError

__all__ = ["Carried", "cache_argument", "cache_of", "carried_in", "check_slices", "tokens_of"]

_KEEPING = {"full_attention", "sliding_attention"}  # layers that keep keys and values

# tokens so far, and keys and values [b, heads, tokens, width] of each own layer
Carried = tuple[int, tuple[tuple[Tensor, Tensor], ...]]


def check_slices(model: nn.Module) -> None:
    """Raise ModelError where a model says that its layers do not attend to keys that a cache keeps.

    What it does not say its layers tell in their first step, by `carried_in`.
    """
    config: Any = model.config
    types = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _KEEPING
    reason = f"it has layers of type {', '.join(sorted(types))}" if types else None
    names = inspect.signature(model.forward).parameters
    if reason is None and not {"cache", "past_key_values"} & set(names):
        reason = "its forward takes no cache"
    if reason is not None:
        raise ModelError(
            f"{type(model).__name__} cannot run on sequences in slices, since {reason}: choose a "
            "schedule that does not cut them"
        )


def tokens_of(carried: Carried | tuple[()]) -> int:
    """Tokens of a sequence that came before."""
    return carried[0] if carried else 0


def cache_of(carried: Carried | tuple[()], *, layers: int, first: int) -> Any:
    """A model's cache with what was carried.

    layers: of the model. first: of the stage's own layers. The others get a number a token, since
    a model asks any of them how many tokens there were.
    """
    from transformers import DynamicCache

    if not carried:
        return DynamicCache()
    tokens, own = carried
    number = torch.zeros(1, 1, tokens, 1)
    behind = layers - first - len(own)
    return DynamicCache([*[(number, number)] * first, *own, *[(number, number)] * behind])


def carried_in(cache: Any, own: Iterable[int], *, tokens: int) -> Carried:
    """What a cache holds of these layers; ModelError where a layer has not kept every token."""
    kept = []
    for layer in own:
        entry = cache.layers[layer] if layer < len(cache.layers) else None
        keys, values = getattr(entry, "keys", None), getattr(entry, "values", None)
        if keys is None or values is None or keys.shape[-2] != tokens:
            raise ModelError(
                f"layer {layer} does not keep keys and values of every token, so sequences cannot "
                "be cut into slices: choose a schedule that does not cut them"
            )
        kept.append((keys, values))
    return tokens, tuple(kept)


def cache_argument(model: nn.Module) -> str:
    """How a model's forward calls its cache, which depends on the release of transformers."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
