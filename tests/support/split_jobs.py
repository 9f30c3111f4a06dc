"""Jobs run by real ranks: schedules with a split backward, beside one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pipe_models import batch, differences, gradients, own, pipeline, reference
from split_models import MODELS, stages_of
from torch import nn

from fullbore import schedules
from fullbore.ir import Kind, Program, Schedule
from fullbore.passes import recompute_ahead, split_backward


@dataclass(frozen=True)
class Case:
    """A schedule, and the kind of stages on it."""

    family: str
    microbatches: int
    virtual_stages: int | None = None
    delay: int = 0
    mixed: bool = False  # every second microbatch keeps its whole backward
    model: str = "block"
    frozen: int = 0  # leading stages without gradients
    recompute: Any = "none"
    ahead: int | None = None

    def schedule(self, ranks: int) -> Schedule:
        whole = schedules.build(
            self.family,
            ranks=ranks,
            microbatches=self.microbatches,
            virtual_stages=self.virtual_stages,
        )
        split = split_backward(whole, delay=self.delay)
        if self.mixed:
            split = join_every_second(split)
        return split if self.ahead is None else recompute_ahead(split, ahead=self.ahead)

    def stages(self, count: int) -> list[nn.Module]:
        made = stages_of(self.model, count)
        for stage in made[: self.frozen]:
            stage.requires_grad_(False)
        for dropout in nn.ModuleList(made).modules():
            if isinstance(dropout, nn.Dropout):
                dropout.p = 0.0  # each process has random numbers of its own
        return made

    @property
    def keeps_the_order(self) -> bool:
        """Whether each weight's gradients are added in the order of their microbatches."""
        return not (self.mixed and self.delay)


def join_every_second(schedule: Schedule) -> Schedule:
    """I and W of even microbatches as one B again."""
    programs = []
    for program in schedule.programs:
        even = program.microbatch % 2 == 0
        kind = program.kind.copy()
        kind[even & (kind == Kind.I)] = Kind.B
        joined = Program(kind=kind, stage=program.stage, microbatch=program.microbatch)
        programs.append(joined.select(~(even & (kind == Kind.W))))
    return Schedule(
        name=schedule.name,
        microbatches=schedule.microbatches,
        placement=schedule.placement,
        programs=tuple(programs),
    )


def compare(rank: int, ranks: int, cases: list[Case]) -> dict[Case, list[str]]:
    """For each case, what differs from one process over three steps, gradients adding up in two."""
    return {case: _compare(rank, ranks, case) for case in cases}


def _compare(rank: int, ranks: int, case: Case) -> list[str]:
    schedule, m = case.schedule(ranks), case.microbatches
    stages, twins = (case.stages(schedule.stages) for _ in range(2))
    wrong: list[str] = []
    with pipeline(stages, schedule, rank, recompute=case.recompute) as pipe:
        for step, rows in enumerate((2, 2, 3)):
            x, y = batch(rows * m, seed=step)
            losses, expected = reference(twins, x.chunk(m), y.chunk(m))
            result = pipe.step(x, y)
            found = gradients(own(stages, schedule, rank))
            wrong += differences(found, expected, exact=case.keeps_the_order)
            wrong += [
                f"{name} is not frozen"
                for name, grad in found.items()
                if grad is not None and int(name.partition(".")[0]) < case.frozen
            ]
            if result.losses and [float(loss) for loss in result.losses] != losses:
                wrong.append("losses")
            if step == 1:
                for module in (*stages, *twins):
                    module.zero_grad()
    return wrong


class Failing(nn.Module):
    """Fails in the backward of one microbatch, once."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls, self.fails_at = inner, 0, -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(x)
        output.register_hook(self.count)  # type: ignore[no-untyped-call]
        return output

    def count(self, gradient: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("on purpose")


def fails_in_an_input_half(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    """A step that fails in rank 0's I, with W's waiting, and one after it."""
    schedule, m = case.schedule(ranks), case.microbatches
    stages = [Failing(stage) for stage in case.stages(schedule.stages)]
    twins = [Failing(stage) for stage in case.stages(schedule.stages)]
    x, y = batch(2 * m)
    linear = torch.nn.functional.linear
    pipe = pipeline(stages, schedule, rank)
    pipe.step(x, y)
    stages[0].fails_at = stages[0].calls + 2
    try:
        pipe.step(x, y)
        error = "none"
    except Exception as failure:
        error = str(failure)
    for module in (*stages, *twins):
        module.zero_grad()
    _, expected = reference(twins, x.chunk(m), y.chunk(m))
    pipe.step(x, y)
    return {
        "error": error,
        "wrong": differences(gradients(own(stages, schedule, rank)), expected),
        "linear is torch's": torch.nn.functional.linear is linear,
    }


__all__ = ["MODELS", "Case", "compare", "fails_in_an_input_half"]
