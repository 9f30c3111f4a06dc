"""Stages that ask for trouble, each for one case; [rows, w] in and out unless said."""

from __future__ import annotations

from typing import Any

import torch
from rig import WIDTH, Block, mse
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES = 7
IGNORED = -100


class Adapted(nn.Module):
    """A frozen block with a trained adapter of rank 2 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Block().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """A checkpointed block that counts how often it is computed."""

    def __init__(self, use_reentrant: bool) -> None:  # noqa: FBT001
        super().__init__()
        self.inner, self.use_reentrant, self.calls = Block(), use_reentrant, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._compute, x, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)  # type: ignore[no-any-return]


class Unused(nn.Module):
    """A block beside a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.unused = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class SometimesUsed(nn.Module):
    """Hands on a second output, which only the microbatches with a positive sum use."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.side = Block(), nn.Linear(WIDTH, WIDTH)
        self.used: list[bool] = []

    def forward(self, x: torch.Tensor, aside: torch.Tensor | None = None) -> Any:
        self.used.append(float(x.detach().sum()) > 0)
        if aside is not None and self.used[-1]:
            x = x + aside
        return self.block(x), self.side(x)


class NeverUsed(SometimesUsed):
    """Hands on a second output that no stage uses."""

    def forward(self, x: torch.Tensor, aside: torch.Tensor | None = None) -> Any:
        return self.block(x), self.side(x)


def mse_of_first(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    return mse(output[0], target)


class TwiceUsed(nn.Module):
    """One weight, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.twice(torch.tanh(self.twice(x)))  # type: ignore[no-any-return]


class Head(nn.Module):
    """A block and a classifier: [rows, w] to [rows, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.classify = Block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.block(x))  # type: ignore[no-any-return]


def mean_of_labelled(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)


def share_of_labelled(logits: torch.Tensor, labels: torch.Tensor, *, total: int) -> torch.Tensor:
    """Sum over this microbatch's labels, divided by the labels of the whole batch."""
    losses = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return losses / total


class TiedModel(nn.Module):
    """Token ids [rows] to logits [rows, classes] with one table at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.first, self.second = Block(), Block()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.table(ids))))  # type: ignore[no-any-return]
