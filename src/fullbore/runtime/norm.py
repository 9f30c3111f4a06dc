"""The norm of a gradient that is spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fullbore.runtime.control import Control
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
    plain = [p for p in parameters if not is_sharded(p)]
    torch.nn.utils.clip_grads_with_norm_(plain, max_norm, torch.tensor(norm))
    _scale_shards([p for p in parameters if is_sharded(p)], max_norm, norm)
    return norm


@torch.no_grad()
def _scale_shards(parameters: Iterable[torch.Tensor], max_norm: float, norm: float) -> None:
    """As torch.nn.utils.clip_grads_with_norm_, which takes no number for sharded gradients."""
    coefficient = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
    for gradient in _gradients(parameters):
        gradient.mul_(coefficient.to(gradient.device))


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients that are here; of a sharded one the shard."""
    found = [p.grad for p in parameters if p.grad is not None]
    return [g.to_local() if is_sharded(g) else g for g in found]
