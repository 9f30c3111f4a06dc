"""The norm of a gradient that is spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fullbore.runtime.control import Control
from fullbore.runtime.main_grad import gradient_of

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
    gradients = [g for g in map(gradient_of, counted) if g is not None]
    squares = [torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in gradients]
    here = float(torch.stack(squares).sum()) if squares else 0.0
    norm = float(control.total([here])[0] ** 0.5)
    here_too = [g for g in map(gradient_of, parameters) if g is not None]
    scale = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
    for gradient in here_too:
        gradient.detach().mul_(scale.to(gradient.device))
    return norm
