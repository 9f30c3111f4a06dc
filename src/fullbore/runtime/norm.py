"""The norm of a gradient that is spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fullbore.runtime.control import Control

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    control: Control,
    parameters: Iterable[nn.Parameter],
    *,
    counted: Iterable[nn.Parameter],
    max_norm: float,
) -> float:
    """Scale this rank's gradients so that the 2-norm of all ranks' is at most max_norm.

    parameters: all of this rank. counted: those whose gradient enters the norm here (a tied
    weight enters at one rank only). Returns the norm before clipping, the same on every rank.
    """
    squares = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float64) ** 2
        for p in counted
        if p.grad is not None
    ]
    here = float(torch.stack(squares).sum()) if squares else 0.0
    norm = float(control.total([here])[0] ** 0.5)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.tensor(norm))
    return norm
