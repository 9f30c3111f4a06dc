"""The norm of a gradient that is spread over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fullbore.runtime.control import Control
from fullbore.runtime.main_grad import gradient_of
from fullbore.runtime.sharded import is_sharded, local_part
from fullbore.runtime.tied import TiedWeight

__all__ = ["clip_grad_norm", "coefficient_of", "counted_here", "scale_to", "squares_of"]


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
    norm = float(control.total([squares_of(counted)])[0] ** 0.5)
    scale_to(parameters, max_norm=max_norm, norm=norm)
    return norm


def counted_here(
    parameters: Iterable[nn.Parameter], tied: Sequence[TiedWeight], *, is_first_replica: bool
) -> list[nn.Parameter]:
    """Those of this rank's parameters whose gradient enters the norm here."""
    copies = {id(copy) for weight in tied for copy in weight.copies}
    owned = {id(weight.copies[0]) for weight in tied if weight.owner}
    once = [p for p in parameters if id(p) not in copies or id(p) in owned]
    return [p for p in once if is_sharded(p) or is_first_replica]


def squares_of(parameters: Iterable[nn.Parameter]) -> float:
    """The sum of the squares of their gradients."""
    squares = [
        torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        for gradient in _gradients(parameters)
    ]
    return float(torch.stack(squares).sum()) if squares else 0.0


def coefficient_of(*, max_norm: float, norm: float) -> torch.Tensor:
    """What gradients of this norm are multiplied by, as torch.nn.utils.clip_grad_norm_ does it."""
    return torch.clamp(max_norm / (torch.tensor(norm, device="cpu") + 1e-6), max=1.0)


def scale_to(parameters: Iterable[nn.Parameter], *, max_norm: float, norm: float) -> None:
    """Scale gradients whose norm over all ranks is `norm` so that it is at most max_norm."""
    coefficient = coefficient_of(max_norm=max_norm, norm=norm)
    for gradient in _gradients(parameters):
        gradient.detach().mul_(coefficient.to(gradient.device))


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients that are here; of a sharded one the shard."""
    return [local_part(g) for g in map(gradient_of, parameters) if g is not None]
