"""Jobs run by real ranks: every schedule that can be run, on stages of unequal size.

Each job takes many cases, so that one set of processes serves them all.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pipe_models import WIDTH, Block, batch, differences, gradients, mse, own, pipeline, reference
from torch import nn

from fullbore import schedules
from fullbore.ir import Kind, Schedule


@dataclass(frozen=True)
class Case:
    """A schedule by name, or in a CSV file."""

    name: str
    microbatches: int
    virtual_stages: int | None = None

    def schedule(self, ranks: int) -> Schedule:
        if self.name.endswith(".csv"):
            return Schedule.from_csv(self.name)
        return schedules.build(
            self.name,
            ranks=ranks,
            microbatches=self.microbatches,
            virtual_stages=self.virtual_stages,
        )


def uneven_stages(count: int) -> list[nn.Module]:
    """Stages of one or two blocks, the same on every rank."""
    torch.manual_seed(1)
    return [nn.Sequential(*(Block() for _ in range(1 + s % 2))) for s in range(count)]


def plain_stages(count: int) -> list[nn.Module]:
    """Stages of one product, the same on every rank."""
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def compare(rank: int, ranks: int, cases: list[Case]) -> dict[Case, list[str]]:
    """For each case, what differs from one process over two steps whose gradients add up."""
    return {case: _compare(rank, case.schedule(ranks)) for case in cases}


def _compare(rank: int, schedule: Schedule) -> list[str]:
    stages, twins = (uneven_stages(schedule.stages) for _ in range(2))
    wrong: list[str] = []
    with pipeline(stages, schedule, rank) as pipe:
        for step, rows in enumerate((2, 3)):
            m = schedule.microbatches
            x, y = batch(rows * m, seed=step)
            losses, expected = reference(twins, x.chunk(m), y.chunk(m))
            result = pipe.step(x, y)
            wrong += differences(gradients(own(stages, schedule, rank)), expected)
            if result.losses and [float(loss) for loss in result.losses] != losses:
                wrong.append("losses")
    return wrong


def in_torch(rank: int, ranks: int, cases: list[Case]) -> dict[Case, list[str]]:
    """The same for files of ours that `torch.distributed.pipelining` runs, for one step of stages
    whose backward it can split.
    """
    return {case: _in_torch(rank, case) for case in cases}


def _in_torch(rank: int, case: Case) -> list[str]:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    schedule = Schedule.from_csv(case.name)
    stages, twins = (plain_stages(schedule.stages) for _ in range(2))
    mine, m = own(stages, schedule, rank), schedule.microbatches
    peer = _PipelineScheduleRuntime(
        [PipelineStage(one, s, schedule.stages, torch.device("cpu")) for s, one in mine.items()],
        n_microbatches=m,
        loss_fn=mse,
    )
    peer._load_csv(case.name, format="compute_only")
    x, y = batch(2 * m)
    _, expected = reference(twins, x.chunk(m), y.chunk(m))
    ends = {"target": y, "losses": []} if schedule.stages - 1 in mine else {}
    peer.step(*([x] if 0 in mine else []), **ends)
    return differences(gradients(mine), expected)


# -- tied weights ---------------------------------------------------------------------------------


class Lookup(nn.Module):
    """A table that turns ids into rows, and blocks behind it."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.block = table, Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.table(ids))  # type: ignore[no-any-return]


class Logits(nn.Module):
    """Blocks, and behind them the product with the table."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.block = table, Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.block(x), self.table.weight)


IDS = 17


def tied_stages(count: int, *, one_table: bool) -> list[nn.Module]:
    """Ids in, logits out; first and last stage with one table, or with copies of it."""
    torch.manual_seed(2)
    table = nn.Embedding(IDS, WIDTH)
    copy = nn.Embedding(IDS, WIDTH)
    copy.load_state_dict(table.state_dict())
    middle = [Block() for _ in range(count - 2)]
    return [Lookup(table), *middle, Logits(table if one_table else copy)]


def compare_tied(rank: int, ranks: int, cases: list[Case]) -> dict[Case, list[str]]:
    """Tied first and last stage, for copies and, where one rank holds both, for one table."""
    found = {}
    for case in cases:
        schedule = case.schedule(ranks)
        shares = schedule.placement.stage_to_rank[0] == schedule.placement.stage_to_rank[-1]
        found[case] = [
            f"{'one table' if one_table else 'copies'}: {wrong}"
            for one_table in ((False, True) if shares else (False,))
            for wrong in _compare_tied(rank, schedule, one_table=one_table)
        ]
    return found


def _compare_tied(rank: int, schedule: Schedule, *, one_table: bool) -> list[str]:
    last, m = schedule.stages - 1, schedule.microbatches
    stages = tied_stages(schedule.stages, one_table=one_table)
    twins = tied_stages(schedule.stages, one_table=True)
    mine = own(stages, schedule, rank)
    loss_fn = nn.functional.cross_entropy
    tied = [{0: "table.weight", last: "table.weight"}]
    wrong: list[str] = []
    with pipeline(stages, schedule, rank, loss_fn, tied=tied) as pipe:
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randint(IDS, (3 * m,), generator=generator) for _ in range(2))
            _, expected = reference(twins, x.chunk(m), y.chunk(m), loss_fn)
            pipe.step(x, y)
            wrong += differences(gradients(mine), expected, exact=False)
            squares = sum(float((p.grad.double() ** 2).sum()) for p in _distinct(twins))
            norm = float(pipe.clip_grad_norm(1e9))
            if abs(norm - squares**0.5) > 1e-5 * norm:
                wrong.append(f"norm {norm}, not {squares**0.5}")
            for module in (*stages, *twins):
                module.zero_grad()
    return wrong


def _distinct(modules: list[nn.Module]) -> list[Any]:
    return list({id(p): p for module in modules for p in module.parameters()}.values())


# -- memory ---------------------------------------------------------------------------------------


class Marked(torch.autograd.Function):
    """A copy in memory of numpy's, whose array tells when the last holder has let go of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: weakref.WeakValueDictionary) -> torch.Tensor:
        array = np.empty(x.shape, dtype=np.float32)
        alive[id(array)] = array
        return torch.from_numpy(array).copy_(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Watched(nn.Module):
    """A product whose input is counted for as long as anybody holds it."""

    def __init__(self, alive: weakref.WeakValueDictionary, most: list[int]) -> None:
        super().__init__()
        self.product, self.alive, self.most = nn.Linear(WIDTH, WIDTH), alive, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = Marked.apply(x, self.alive)  # type: ignore[no-untyped-call]
        self.most[0] = max(self.most[0], len(self.alive))
        output: torch.Tensor = self.product(given)
        return output


def live(rank: int, ranks: int, cases: list[Case]) -> dict[Case, int]:
    """Most inputs of products that a rank held at once, of all its stages, for each case."""
    gc.disable()  # what dies, dies at once, not by the collector
    found = {}
    for case in cases:
        schedule = case.schedule(ranks)
        alive: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        most = [0]
        stages: list[nn.Module] = [Watched(alive, most) for _ in range(schedule.stages)]
        with pipeline(stages, schedule, rank) as pipe:
            for step in range(2):
                pipe.step(*batch(2 * schedule.microbatches, seed=step))
                assert not alive
        found[case] = most[0]
    return found


def counted(schedule: Schedule) -> list[int]:
    """Most stages and microbatches that each rank may hold, by its program."""
    steps = {Kind.F: 1, Kind.B: -1, Kind.W: -1}
    most = []
    for program in schedule.programs:
        held = peak = 0
        for action in program:
            held += steps.get(action.kind, 0)
            peak = max(peak, held)
        most.append(peak)
    return most
