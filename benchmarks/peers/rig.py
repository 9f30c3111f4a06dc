"""A pipeline of torch's on one rank, and the same stages in one process beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor

WIDTH = 8
M = 4

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One of torch's schedules.

    per_rank: stages a rank holds; folded: the second half goes back to the first rank.
    """

    name: str
    make: Callable[..., Any]
    per_rank: int = 1
    folded: bool = False

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        if self.folded:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + ranks * local for local in range(self.per_rank)]

    def build(self, stages: list[PipelineStage], m: int, loss: Loss, **options: Any) -> Any:
        given = stages[0] if self.per_rank == 1 else stages
        return self.make(given, m, loss_fn=loss, **options)


GPIPE = Kind(name="GPipe", make=ScheduleGPipe)
ONE_F_ONE_B = Kind(name="1F1B", make=Schedule1F1B)
INTERLEAVED = Kind(name="Interleaved1F1B", make=ScheduleInterleaved1F1B, per_rank=2)
ZERO_BUBBLE = Kind(name="InterleavedZeroBubble", make=ScheduleInterleavedZeroBubble, per_rank=2)
ZBV = Kind(name="ZBVZeroBubble", make=ScheduleZBVZeroBubble, per_rank=2, folded=True)
WHOLE = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
SPLIT = (ZERO_BUBBLE, ZBV)
EVERY = WHOLE + SPLIT


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Block(nn.Module):
    """Two linear layers with something curved between them; [rows, w] in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def blocks(count: int, make: Callable[[], nn.Module] = Block) -> list[nn.Module]:
    """Stages, the same on every rank."""
    torch.manual_seed(1)
    return [make() for _ in range(count)]


def batch(rows: int, seed: int = 0, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target, [rows, w] or [rows, length, w], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, WIDTH) if length is None else (rows, length, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


class Rig:
    """This rank's part of a pipeline of torch's; `twins` are all stages, for one process.

    scale_grads: torch's; without it the loss that torch is given is divided by M, as its users do.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        kind: Kind,
        modules: Sequence[nn.Module] | None = None,
        *,
        m: int = M,
        loss: Loss = mse,
        scale_grads: bool = True,
        group: dist.ProcessGroup | None = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        **options: Any,
    ) -> None:
        self.m, self.loss, self.kind = m, loss, kind
        self.count = kind.per_rank * ranks
        modules = blocks(self.count) if modules is None else modules
        self.twins = [copy.deepcopy(module) for module in modules]
        self.modules = {s: modules[s] for s in kind.stages_of(rank, ranks)}
        self.stages = [
            PipelineStage(wrap(module), s, self.count, torch.device("cpu"), group=group)
            for s, module in self.modules.items()
        ]
        theirs = loss if scale_grads else _divided(loss, m)
        self.schedule = kind.build(self.stages, m, theirs, scale_grads=scale_grads, **options)

    def step(self, x: Any, y: Any, **kwargs: Any) -> list[torch.Tensor]:
        """One step, as torch's documentation calls it; the losses, on the last stage's rank."""
        losses: list[torch.Tensor] = []
        self._call(self.schedule.step, x, y, losses=losses, **kwargs)
        return losses

    def step_unwatched(self, x: Any, y: Any, **kwargs: Any) -> None:
        """A step that asks for no losses."""
        self._call(self.schedule.step, x, y, **kwargs)

    def evaluate(self, x: Any, y: Any) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        self._call(self.schedule.eval, x, y, losses=losses)
        return losses

    def _call(self, method: Any, x: Any, y: Any, **kwargs: Any) -> None:
        inputs = (x if isinstance(x, tuple) else (x,)) if 0 in self.modules else ()
        if self.count - 1 in self.modules:
            kwargs["target"] = y
        method(*inputs, **kwargs)

    def zero_grad(self) -> None:
        for module in (*self.modules.values(), *self.twins):
            module.zero_grad()

    def alone(self, xs: Sequence[Any], ys: Sequence[Any], **kwargs: Any) -> None:
        """The same microbatches in one process, the mean of their losses; gradients add up."""
        for x, y in zip(xs, ys, strict=True):
            (self.loss(self.chain(x, **kwargs), y) / self.m).backward()

    def chain(self, x: Any, **kwargs: Any) -> Any:
        for twin in self.twins:
            x = twin(*x, **kwargs) if isinstance(x, tuple) else twin(x, **kwargs)
        return x

    def cut(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.tensor_split(whole, self.m))

    def gradients(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's gradients, "stage.parameter", and those of one process."""
        found = {
            f"{s}.{name}": None if p.grad is None else _whole(p.grad).detach().clone()
            for s, module in self.modules.items()
            for name, p in module.named_parameters()
        }
        expected = {
            f"{s}.{name}": None if p.grad is None else p.grad.clone()
            for s in self.modules
            for name, p in self.twins[s].named_parameters()
        }
        return found, expected


def _whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _divided(loss: Loss, m: int) -> Loss:
    return lambda *args, **kwargs: loss(*args, **kwargs) / m


def one_step(rig: Rig, x: torch.Tensor, y: torch.Tensor, **kwargs: Any) -> Any:
    """The gradients of one step and those of one process."""
    rig.alone(rig.cut(x), rig.cut(y), **kwargs)
    rig.step(x, y, **kwargs)
    return rig.gradients()
