"""Small models cut into stages, and what one process makes of them: the reference of all tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullbore.ir import Schedule
from fullbore.runtime import Pipeline

WIDTH = 12
Grads = dict[str, torch.Tensor | None]


class Block(nn.Module):
    """A residual block with a norm, two products and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.twice = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.nn.functional.gelu(self.up(self.norm(x * self.twice))))
        return x + hidden * self.twice


def block_stages(count: int, seed: int = 0) -> list[nn.Module]:
    """`count` different blocks, the same on every rank."""
    torch.manual_seed(seed)
    return [Block() for _ in range(count)]


def batch(rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [rows, WIDTH]."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, WIDTH, generator=generator) for _ in range(2))  # type: ignore


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


def chain(stages: Sequence[nn.Module], value: Any, **kwargs: Any) -> Any:
    """One process: each stage called with the one before's output, tuples as arguments."""
    for stage in stages:
        value = stage(*value, **kwargs) if isinstance(value, tuple) else stage(value, **kwargs)
    return value


def reference(
    stages: Sequence[nn.Module],
    inputs: Sequence[Any],
    targets: Sequence[Any],
    loss_fn: Callable[[Any, Any], torch.Tensor] = mse,
    *,
    weight: float | None = None,
) -> tuple[list[float], Grads]:
    """Losses and gradients of one process on the same microbatches; gradients are added up."""
    weight = 1.0 / len(inputs) if weight is None else weight
    losses = []
    for value, target in zip(inputs, targets, strict=True):
        loss = loss_fn(chain(stages, value), target)
        (loss * weight).backward()
        losses.append(float(loss.detach()))
    return losses, gradients(dict(enumerate(stages)))


def gradients(stages: Mapping[int, nn.Module]) -> Grads:
    """Gradients by stage and parameter name."""
    return {
        f"{stage}.{name}": None if p.grad is None else p.grad.clone()
        for stage, module in stages.items()
        for name, p in module.named_parameters()
    }


def differences(found: Grads, expected: Grads, *, exact: bool = True) -> list[str]:
    """Parameters of `found` whose gradient is not the expected one.

    exact: bitwise; else within 1e-5 of the largest element, for sums in another order.
    """
    wrong = []
    for name, grad in found.items():
        other = expected[name]
        if (grad is None) != (other is None):
            wrong.append(f"{name}: {grad is None=} {other is None=}")
        elif grad is not None and other is not None and not torch.equal(grad, other):
            off = float((grad - other).abs().max())
            if exact or not off <= 1e-5 * float(other.abs().max()):
                wrong.append(f"{name}: off by {off}")
    return wrong


def own(stages: Sequence[nn.Module], schedule: Schedule, rank: int) -> dict[int, nn.Module]:
    """The modules that the schedule places on a rank."""
    return {s: stages[s] for s in schedule.placement.stages_of(rank)}


def pipeline(
    stages: Sequence[nn.Module], schedule: Schedule, rank: int, loss_fn: Any = mse, **options: Any
) -> Pipeline:
    """This rank's part of a pipeline over all stages."""
    return Pipeline(own(stages, schedule, rank), schedule, loss_fn, **options)
