"""The norm of a gradient that is spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fullbore.runtime.control import Control
from fullbore.runtime.main_grad import gradient_of
from fullbore.runtime.sharded import is_sharded

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    control: Control,
    parameters: Sequence[nn.Parameter],
    *,
    counted: Iterable[nn.Parameter],
    max_norm: float,
) -> float:
    """Scale this rank's gradients so that the 2-norm of all ranks' is at most max_norm.

    parameters: all of this rank. counted: those whose gradient enters the norm here (a tied
    weight, or one that replicas have copies of, enters at one rank only; of a sharded one each
    rank's shard). Returns the norm before clipping, the same on every rank.
    """
    squares = [
        torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        for gradient in _gradients(counted)
    ]
    here = float(torch.stack(squares).sum()) if squares else 0.0
    norm = float(control.total([here])[0] ** 0.5)
    coefficient = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
    for gradient in _gradients(parameters):
        gradient.detach().mul_(coefficient.to(gradient.device))
    return norm


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that are here; of a sharded one the shard."""
    found = [g for g in map(gradient_of, parameters) if g is not None]
    return [g.to_local() if is_sharded(g) else g for g in found]
