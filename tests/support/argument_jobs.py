"""Jobs run by two real ranks: arguments of which one is wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pipe_models import (
    WIDTH,
    batch,
    block_stages,
    differences,
    gradients,
    mse,
    own,
    pipeline,
    reference,
)
from torch import nn

from fullbore import schedules
from fullbore.errors import FullboreError
from fullbore.ir import from_text
from fullbore.runtime import Pipeline


class Grows(nn.Module):
    """Its output's shape changes from call to call, though its input's does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x).repeat(self.calls // 3 + 1, 1)


def refusal(rank: int, wrong: str) -> str:
    """The error of a pipeline that is wrong in one way."""
    stages: list[nn.Module] = list(block_stages(3))
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    try:
        if wrong == "stages":
            Pipeline({0: stages[0]}, schedule, lambda o, t: o.sum())
        elif wrong == "schedules":
            other = schedules.gpipe(ranks=2, microbatches=2)
            pipeline(stages, schedule if rank else other, rank)
        elif wrong == "size":
            pipeline(stages, schedules.gpipe(ranks=3, microbatches=2), rank)
        elif wrong == "size of one":
            other = schedules.gpipe(ranks=3, microbatches=2)
            pipeline(stages, schedule if rank else other, rank)
        elif wrong == "law":
            broken = from_text("0F0,0B0\n1B0,1F0\n")
            Pipeline({rank: stages[rank]}, broken if rank else schedule, mse)
        elif wrong == "shapes":
            stages[0] = Grows()
            pipe = pipeline(stages, schedule, rank, lambda o, t: o.sum())
            for _ in range(3):
                pipe.step(*batch(2))
        elif wrong == "reduction":
            pipeline(stages, schedule, rank, reduction=("mean", "sum")[rank])
        elif wrong == "record":
            pipeline(stages, schedule, rank, record=rank == 1)
        elif wrong == "tied":
            pipeline(stages, schedule, rank, tied=[{0: "twice", 1: "twice"}] if rank else [])
        elif wrong == "rows":
            pipeline(stages, schedule, rank).step(torch.ones(8, WIDTH), torch.ones(2, WIDTH))
    except FullboreError as error:
        return str(error)
    return "no error"


class Casts(nn.Module):
    """Works in the type of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self.inner.weight.dtype))


def _two_casts() -> list[nn.Module]:
    """Two stages; the first is frozen, so its output wants a gradient where its input does."""
    torch.manual_seed(0)
    return [Casts().requires_grad_(False), Casts()]


def changing_circumstances(rank: int) -> list[str]:
    """What differs from one process while dtypes, autocast and gradients of the inputs change."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    stages, twins = (_two_casts() for _ in range(2))
    wrong: list[str] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse(output.float(), target)

    with pipeline(stages, schedule, rank, loss_fn) as pipe:
        for dtype, autocast, wanted in (
            (torch.float32, False, False),
            (torch.float32, False, True),
            (torch.float32, True, False),
            (torch.bfloat16, False, True),
            (torch.float32, False, False),
        ):
            for module in (*stages, *twins):
                module.to(dtype).zero_grad()
            x, y = batch(4)
            parts = [part.clone().requires_grad_(wanted) for part in x.chunk(2)]
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                _, expected = reference(twins, parts, y.chunk(2), loss_fn)
                pipe.step(x.requires_grad_(wanted), y)
            wrong += differences(gradients(own(stages, schedule, rank)), expected)
    return wrong


def beside_the_group(rank: int) -> str:
    """What a rank is told that makes a pipeline over a group of other ranks."""
    group = dist.new_group([1])
    [stage] = block_stages(1)
    schedule = schedules.gpipe(ranks=1, microbatches=2)
    try:
        with Pipeline({0: stage}, schedule, mse, group=group) as pipe:
            pipe.step(*batch(4))
    except FullboreError as error:
        return str(error)
    return "no error"
