"""First values: random weights that do not depend on how the model is cut, and computed buffers.

A stage is built on the meta device, so whatever a constructor computed (rotary frequencies, the
scale of an embedding) has to be computed again. Transformers' own `_init_weights` does both that
and the random weights, module by module; here each module draws from a generator seeded by the
run's seed and the module's name, so that P = 1 and P = 8 start from the same model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullbore.errors import ModelError

__all__ = ["draw_weights", "restore_buffers"]

_INITIALIZED = "_is_hf_initialized"  # transformers leaves a tensor with this flag alone


def restore_buffers(model: nn.Module, names: Sequence[str]) -> None:
    """Compute the buffers of these modules, on the CPU; weights are left as they are.

    Raises ModelError where the family computes a buffer in its constructor only.
    """
    for name in names:
        module = model.get_submodule(name)
        buffers = {key: b for key, b in module.named_buffers(recurse=False) if b.is_meta}
        if not buffers:
            continue
        for key, buffer in buffers.items():
            module._buffers[key] = _unset(buffer)
        _initialize(_innermost(model, name), module, keep=list(module.parameters()))
        for key in buffers:
            value = module.get_buffer(key)
            if torch.equal(_bits(value), _bits(_unset(value))):
                raise ModelError(
                    f"{type(model).__name__} cannot be built in parts: transformers computes the "
                    f"buffer {key!r} of {name} in its constructor only"
                )


def draw_weights(
    model: nn.Module, name: str, module: nn.Module, *, seed: int, keep: Sequence[Tensor] = ()
) -> None:
    """Draw the weights of one module (on the CPU) from a generator of its own name.

    Children come before their parents, as transformers goes through a model, whose rules apply;
    the model may have lost the module. keep: weights left as they are.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed_of(name, seed))
        _initialize(_innermost(model, name), module, keep=keep)


def _initialize(model: Any, module: nn.Module, *, keep: Sequence[Tensor]) -> None:
    for tensor in keep:
        setattr(tensor, _INITIALIZED, True)
    with torch.no_grad():
        model._init_weights(module)
    for tensor in keep:
        delattr(tensor, _INITIALIZED)


def _innermost(model: nn.Module, name: str) -> Any:
    """The innermost transformers model around a module: its family's rules apply."""
    inner, module = model, model
    for part in name.split(".") if name else ():
        module = module.get_submodule(part)
        if hasattr(module, "_init_weights"):
            inner = module
    return inner


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def _unset(like: Tensor) -> Tensor:
    """A value that no computation gives: NaN, or the smallest integer."""
    if like.dtype == torch.bool:
        return torch.zeros(like.shape, dtype=torch.bool)
    value = float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).min
    return torch.full(like.shape, value, dtype=like.dtype)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor
