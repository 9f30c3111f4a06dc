"""Jobs run by two real ranks: arguments of which one is wrong."""

from __future__ import annotations

import time
from typing import Any

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


class Keeps(nn.Module):
    """Keeps a sparse matrix, and in its second step gives something else than dense tensors."""

    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.inner, self.odd, self.calls = nn.Linear(WIDTH, WIDTH), odd, 0
        self.register_buffer("eye", torch.eye(WIDTH).to_sparse())

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = torch.sparse.mm(self.eye, self.inner(x).t()).t()
        return y if self.calls <= 2 else self.odd(y)


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
        elif wrong in ("sparse", "lambda"):
            odd = {"sparse": lambda y: (y.to_sparse(),), "lambda": lambda y: (y, lambda: y)}
            stages[0] = Keeps(odd[wrong])
            pipe = pipeline(stages, schedule, rank, lambda o, t: o.sum())
            for _ in range(2):
                pipe.step(*batch(2))
        elif wrong == "recompute":
            blocks = nn.Sequential(*block_stages(2 + rank))
            with Pipeline({rank: blocks}, schedule, mse, recompute=3) as pipe:
                pipe.step(*batch(4))  # one stage has fewer
            Pipeline({rank: blocks}, schedule, mse, recompute=4)
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


ODD_KINDS: dict[str, Any] = {
    "stages": [],
    "schedule": "1f1b",
    "loss_fn": 3,
    "on_stall": 3,
    "clock": None,
    "tied": {0: "twice"},
    "recompute": "some",
    "main_grad_dtype": torch.int32,
    "reduce_dtype": "float32",
    "timeout_s": float("nan"),
    "stall_timeout_s": 1e30,
    "flight_record": 3,
    "device": "cuda:99",
    "count_fn": mse,  # right, but only with reduction="mean"
}


def odd_kinds(rank: int) -> dict[str, list[str]]:
    """By argument, what both ranks say where rank 1 is given something odd."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    said: dict[str, list[str]] = {}
    for name, odd in ODD_KINDS.items():
        right: dict[str, Any] = {"stages": {rank: block_stages(2)[rank]}, "schedule": schedule}
        right |= {"loss_fn": mse, "reduction": "sum" if name == "count_fn" else "mean"}
        begun_s = time.monotonic()
        try:
            Pipeline(**(right | {name: odd} if rank else right))
        except FullboreError as error:
            soon = time.monotonic() - begun_s < 20
            said[name] = [type(error).__name__, str(error) if soon else "too late"]
    return said


TIED_ODDLY: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "dtype": ((4, 2), torch.float64),
    "shape": ((2, 4), torch.float32),
    "size": ((4, 4), torch.float32),
}


def tied_oddly(rank: int) -> dict[str, str]:
    """What is said where the copies of a tied weight are not alike."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    said = {}
    for what, (shape, dtype) in TIED_ODDLY.items():
        stage = nn.Module()
        stage.w = nn.Parameter(torch.zeros(shape, dtype=dtype) if rank else torch.zeros(4, 2))
        try:
            Pipeline({rank: stage}, schedule, mse, tied=[{0: "w", 1: "w"}])
        except FullboreError as error:
            said[what] = str(error)
    return said


def different_calls(rank: int) -> str:
    """What is said where ranks call different methods of a pipeline."""
    schedule = schedules.one_f_one_b(ranks=2, microbatches=2)
    pipe = pipeline(list(block_stages(2)), schedule, rank, timeout_s=3)
    pipe.step(*batch(2))
    try:
        if rank:
            pipe.step(*batch(2))
        else:
            pipe.clip_grad_norm(1.0)
    except FullboreError as error:
        return str(error)
    return "no error"
