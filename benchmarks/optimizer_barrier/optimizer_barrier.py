"""What does the optimizer's barrier cost, and what is left of it when steps are validated late?

ZB-H2 keeps every rank busy from its first action to its last, but ranks end as far apart as they
began: with a barrier for the global norm each step pays (P - 1) T_F. Stages sleep for known times;
processes, messages, autograd, split backward, norm and optimizer are real. Both ways run in turn in
one pool of processes.

    python benchmarks/optimizer_barrier/optimizer_barrier.py         # P = 4, M = 12
    python benchmarks/optimizer_barrier/optimizer_barrier.py --help

Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from fullbore.cost import Costs
from fullbore.ir import Action, Kind, Placement, Program, Schedule
from fullbore.runtime import Pipeline, PostValidatedOptimizer, Validated, paced_loss, wake_on_time
from fullbore.sim import simulate
from fullbore.timeline import summarize
from fullbore.train.launch import end_with_parent
from fullbore.verify import check

WIDTH = 64
MAX_NORM = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One job; unit_s: seconds of F, of I and of W; rows: of one activation of WIDTH floats."""

    ranks: int
    microbatches: int
    unit_s: float
    rows: int
    steps: int
    rounds: int
    clipped_every: int


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Every rank does what is most urgent: I, else F while 2P - 1 are alive, else W."""
    ends: dict[Action, int] = {}
    done = [dict.fromkeys((Kind.I, Kind.F, Kind.W), 0) for _ in range(ranks)]
    programs: list[list[Action]] = [[] for _ in range(ranks)]
    now = 0

    def action(kind: Kind, stage: int, microbatch: int) -> Action:
        return Action(kind=kind, stage=stage, microbatch=microbatch)

    def is_ready(kind: Kind, rank: int) -> bool:
        count = done[rank]
        number = count[kind]
        if number == microbatches:
            return False
        if kind == Kind.F:
            alive = count[Kind.F] - count[Kind.W]
            return alive < 2 * ranks - 1 and (
                rank == 0 or ends.get(action(kind, rank - 1, number), now + 1) <= now
            )
        if kind == Kind.I:
            return count[Kind.F] > number and (
                rank == ranks - 1 or ends.get(action(kind, rank + 1, number), now + 1) <= now
            )
        return count[Kind.I] > number

    while any(count[Kind.W] < microbatches for count in done):
        for rank in range(ranks):
            kind = next((kind for kind in done[rank] if is_ready(kind, rank)), None)
            if kind is not None:
                programs[rank].append(action(kind, rank, done[rank][kind]))
                ends[programs[rank][-1]] = now + 1
                done[rank][kind] += 1
        now += 1
    return Schedule(
        name="zb-h2",
        microbatches=microbatches,
        placement=Placement(stage_to_rank=tuple(range(ranks))),
        programs=tuple(Program.of(program) for program in programs),
    )


class _Sleep(torch.autograd.Function):
    """Passes numbers on unchanged, so that one that is none reaches the loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit_s: float) -> torch.Tensor:  # type: ignore[override]
        ctx.unit_s = unit_s
        time.sleep(unit_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.unit_s)
        return gradient, None


class PacedSplit(nn.Module):
    """Sleeps in F, in I, and in W when its weight's gradient is there."""

    def __init__(self, unit_s: float) -> None:
        super().__init__()
        self.unit_s = unit_s
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(unit_s))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        result: torch.Tensor = self.linear(_Sleep.apply(x, self.unit_s))
        return result


def run(rank: int, setting: Setting, store: str, told: str) -> None:
    """One rank: both ways in turn."""
    end_with_parent()
    torch.set_num_threads(1)
    wake_on_time()
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, setting.ranks), rank=rank, world_size=setting.ranks
    )
    schedule = zb_h2(setting.ranks, setting.microbatches)
    x = torch.zeros(setting.microbatches * setting.rows, WIDTH)
    ways = [
        make(schedule, setting, rank, x)
        for make in (with_barrier, with_ahead, with_ahead_and_bad_steps)
    ]
    times: list[list[float]] = [[] for _ in ways]
    for number in range(setting.rounds + 1):
        for way, taken in zip(ways, times, strict=True):
            dist.barrier()
            begun_s = time.perf_counter()
            way()
            if number:
                taken.append((time.perf_counter() - begun_s) / setting.steps)
    slowest: list[list[list[float]]] = [[] for _ in range(setting.ranks)]
    dist.all_gather_object(slowest, times)
    if rank == 0:
        with open(told, "w", encoding="utf-8") as file:
            json.dump(
                [
                    [max(of_rank[way][i] for of_rank in slowest) for i in range(setting.rounds)]
                    for way in range(len(ways))
                ],
                file,
            )
    dist.barrier()
    dist.destroy_process_group()


def _parts(
    schedule: Schedule, setting: Setting, rank: int
) -> tuple[Pipeline, torch.optim.Optimizer]:
    stage = PacedSplit(setting.unit_s)
    pipe = Pipeline({rank: stage}, schedule, paced_loss)
    return pipe, torch.optim.AdamW(stage.parameters(), lr=0.0)


def with_barrier(
    schedule: Schedule, setting: Setting, rank: int, x: torch.Tensor
) -> Callable[[], None]:
    """Some steps, each waiting for the global norm."""
    pipe, optimizer = _parts(schedule, setting, rank)

    def steps() -> None:
        for _ in range(setting.steps):
            pipe.step(x, x)
            pipe.clip_grad_norm(MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

    return steps


def with_ahead(
    schedule: Schedule, setting: Setting, rank: int, x: torch.Tensor, *, bad_steps: bool = False
) -> Callable[[], None]:
    """The same, validated late; bad_steps: with a loss that is no number in every n-th step."""
    pipe, optimizer = _parts(schedule, setting, rank)
    ahead = PostValidatedOptimizer(pipe, optimizer, max_norm=MAX_NORM)
    numbers = range(setting.steps)
    bad = [n for n in numbers if bad_steps and n % setting.clipped_every == 1]

    def steps() -> None:
        done: list[Validated] = []
        for number in numbers:
            done += ahead.step(x + float("nan") if number in bad else x, x)
        done += ahead.finish()
        assert [n for n in numbers if done[n].skipped] == bad
        assert sum(step.redone for step in done) == len(bad)

    return steps


def with_ahead_and_bad_steps(
    schedule: Schedule, setting: Setting, rank: int, x: torch.Tensor
) -> Callable[[], None]:
    """Validated late, and now and then wrong."""
    return with_ahead(schedule, setting, rank, x, bad_steps=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=12)
    parser.add_argument("--unit-s", type=float, default=0.01)
    parser.add_argument("--rows", type=int, default=256, help="of 64 floats: 256 are 64 KiB")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clipped-every", type=int, default=10)
    setting = Setting(**vars(parser.parse_args()))
    schedule = zb_h2(setting.ranks, setting.microbatches)
    check(schedule)
    unit = setting.unit_s
    costs = Costs.uniform(
        stages=setting.ranks, forward_s=unit, input_grad_s=unit, weight_grad_s=unit
    )
    summary = summarize(simulate(schedule, costs), schedule)
    span_s = summary.makespan_s - (setting.ranks - 1) * unit
    with tempfile.TemporaryDirectory() as folder:
        told = f"{folder}/told.json"
        torch.multiprocessing.spawn(
            run, (setting, f"{folder}/store", told), nprocs=setting.ranks, join=True
        )
        with open(told, encoding="utf-8") as file:
            measured = [statistics.median(way) for way in json.load(file)]
    floor_s = 3 * setting.microbatches * unit
    print(f"P={setting.ranks} M={setting.microbatches}, F=I=W={unit * 1e3:g} ms; seconds a step")
    rows = (
        ("with a barrier", measured[0], summary.makespan_s),
        ("validated late", measured[1], span_s),
        (f"validated late, 1 of {setting.clipped_every} redone", measured[2], None),
    )
    for name, seconds, theory in rows:
        theory_text = "" if theory is None else f"  theory {theory:.4f}"
        print(f"{name:32} {seconds:.4f}  bubble {1 - floor_s / seconds:6.1%}{theory_text}")


if __name__ == "__main__":
    main()
