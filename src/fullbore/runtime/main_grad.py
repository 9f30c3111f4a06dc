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
from torch.utils.hooks import RemovableHandle

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
    """Keeps main gradients for those weights that have another dtype; `close` ends it.

    A weight's main gradient is None until its first gradient comes, and again whenever it is set
    to None, as an optimizer does after it has stepped.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights: dict[int, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []

    def keep_for(self, weights: Iterable[nn.Parameter]) -> None:
        """From now on for these too, as far as they are trained; a weight may be so later only."""
        for weight in weights:
            if weight.requires_grad and id(weight) not in self._weights:
                self._keep_for(weight)

    def _keep_for(self, weight: nn.Parameter) -> None:
        if weight.dtype == self._dtype:
            return
        self._weights[id(weight)] = weight
        setattr(weight, _NAME, None)
        setattr(weight, _DTYPE, self._dtype)
        self._hooks.append(weight.register_post_accumulate_grad_hook(self._move))  # type: ignore[no-untyped-call]

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
        for weight in self._weights.values():
            delattr(weight, _NAME)
            delattr(weight, _DTYPE)
        self._weights = {}
