"""Jobs run by two real ranks: arguments of which one is wrong."""

from __future__ import annotations

import torch
from pipe_models import WIDTH, batch, block_stages, pipeline
from torch import nn

from fullbore import schedules
from fullbore.errors import FullboreError
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
        elif wrong == "shapes":
            stages[0] = Grows()
            pipe = pipeline(stages, schedule, rank, lambda o, t: o.sum())
            for _ in range(3):
                pipe.step(*batch(2))
    except FullboreError as error:
        return str(error)
    return "no error"
