"""Stages for case 16: what goes from one stage to the next, and how it was made.

Each takes x [rows, w] and whatever its kind hands on beside it, and gives the same.
"""

from __future__ import annotations

from typing import Any

import torch
from rig import WIDTH, Block, mse
from torch import nn


class Tuple(nn.Module):
    """Two tensors that are both trained through."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.side = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Any:
        x = x if side is None else x + side
        return self.block(x), self.side(x)


class Dict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Any) -> Any:
        return {"x": self.block(x["x"] if isinstance(x, dict) else x)}


class NoneBeside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, nothing: None = None) -> Any:
        return self.block(x), nothing


class Beside(nn.Module):
    """Hands on a tensor that no gradient goes through: ids, a mask, or a constant."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.block, self.dtype = Block(), dtype

    def forward(self, x: torch.Tensor, aside: torch.Tensor | None = None) -> Any:
        if aside is None:
            aside = (torch.arange(x.shape[0]) % 2).to(self.dtype)
        return self.block(x) * (1 + aside[:, None].to(x.dtype)), aside


class View(nn.Module):
    """A contiguous view of something larger."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).view(x.shape)  # type: ignore[no-any-return]


class Strided(nn.Module):
    """Every second column of something twice as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        return torch.cat([x, 2 * x], dim=1)[:, ::2]


class InPlace(nn.Module):
    """Begins with a change in place of what it was given, where that is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.5 if x.is_leaf and not x.requires_grad else x.mul_(1.5)
        return self.block(x)  # type: ignore[no-any-return]


class Shift(nn.Module):
    """Hands the gradient of its output on as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Turned(nn.Module):
    """Hands a transposed gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x.t().contiguous() * self.weight  # [w, rows]
        return torch.tanh(turned).t().contiguous()


def loss_of_first(output: Any, target: torch.Tensor) -> torch.Tensor:
    if isinstance(output, dict):
        return mse(output["x"], target)
    return mse(output[0] if isinstance(output, tuple) else output, target)


def loss_by_sum(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Its gradient is one number, expanded: strides of 0."""
    total: torch.Tensor = output.sum()
    return total
