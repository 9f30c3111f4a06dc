"""Main gradients: what weights in few bits accumulate over microbatches, kept in more bits.

The sum of many small gradients loses its last bits in bfloat16. With main gradients each weight
has a `main_grad`, as Megatron calls it, to which every microbatch's gradient is added, and its
`.grad` stays None. Whole and split backwards come the same way: through autograd's accumulation,
behind the weight's own hooks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

__all__ = ["MainGradients", "gradient_dtype", "gradient_of", "set_gradient"]

_NAME = "main_grad"
_DTYPE = "_fullbore_main_grad_dtype"


def gradient_of(weight: nn.Parameter) -> torch.Tensor | None:
    """What a weight has accumulated: its main gradient where it keeps one, else its .grad."""
    gradient: torch.Tensor | None = vars(weight).get(_NAME, weight.grad)
    return gradient


def set_gradient(weight: nn.Parameter, gradient: torch.Tensor | None) -> None:
    """Put another one in its place; None forgets it."""
    if _NAME in vars(weight):
        setattr(weight, _NAME, gradient)
    else:
        weight.grad = gradient


def gradient_dtype(weight: nn.Parameter) -> torch.dtype:
    """What a weight's gradient accumulates in."""
    dtype: torch.dtype = vars(weight).get(_DTYPE, weight.dtype)
    return dtype


class MainGradients:
    """Keeps main gradients for those of the weights that have another dtype; `close` ends it.

    A weight's main gradient is None until its first gradient comes, and again whenever it is set
    to None, as an optimizer does after it has stepped.
    """

    def __init__(self, weights: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights = [w for w in weights if w.requires_grad and w.dtype != dtype]
        for weight in self._weights:
            setattr(weight, _NAME, None)
            setattr(weight, _DTYPE, dtype)
        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._move)  # type: ignore[no-untyped-call]
            for weight in self._weights
        ]

    @torch.no_grad()
    def _move(self, weight: torch.Tensor) -> None:
        """One microbatch's gradient has come."""
        gradient, before = weight.grad, vars(weight)[_NAME]
        assert gradient is not None
        weight.grad = None
        if before is None:
            setattr(weight, _NAME, gradient.to(self._dtype))
        else:
            before.add_(gradient)

    def close(self) -> None:
        """Gradients go to .grad again."""
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights:
            delattr(weight, _NAME)
            delattr(weight, _DTYPE)
        self._weights = []
