"""How close to the simulated time does an engine come when everything but the arithmetic is real?

Each stage's compute is a sleep of known length; processes, messages, autograd and the engine are
real. Fullbore and torch.distributed.pipelining run in turn in one pool of processes, and so does
the floor: the same order of actions over bare isend and irecv, each receive posted in advance, with
sleeps and no autograd. "autograd" is the floor with the stages really called, forward and backward,
which no engine can leave out. DeepSpeed takes part where it is installed (see deepspeed_steps.py).

Sleeping ranks take no core, so that 8 ranks can share two; what their messages and wake-ups cost
there is part of the result. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import deepspeed_steps
import pool
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.ir import Action, Kind, Schedule
from fullbore.passes import insert_communication
from fullbore.runtime import PacedStage, Pipeline, paced_loss
from fullbore.sim import simulate
from fullbore.timeline import summarize

SUMMARY = "sleeping stages: excess over the simulated time, ours, torch's, and bare messages"

Step = Callable[[], None]
Arrived = dict[Action, torch.Tensor]  # messages, by their receives
Compute = Callable[[Action, Arrived], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One job: P ranks, M microbatches, seconds of a whole rank, bytes of one activation."""

    ranks: int
    microbatches: int
    forward_s: float
    backward_s: float
    message_bytes: int
    steps: int
    rounds: int
    names: tuple[str, ...]

    def schedule(self, name: str) -> Schedule:
        """The schedule; two virtual stages where it interleaves."""
        virtual_stages = 2 if name == "interleaved" else None
        return schedules.build(
            name,
            ranks=self.ranks,
            microbatches=self.microbatches,
            virtual_stages=virtual_stages,
        )

    def seconds(self, schedule: Schedule) -> dict[Kind, float]:
        """Of one stage's actions; the halves of a split backward take as long as each other."""
        v = schedule.virtual_stages
        return {
            Kind.F: self.forward_s / v,
            Kind.B: self.backward_s / v,
            Kind.I: self.backward_s / v / 2,
            Kind.W: self.backward_s / v / 2,
        }

    def stage(self, schedule: Schedule) -> PacedStage:
        """A stage that sleeps its share of the rank's time."""
        v = schedule.virtual_stages
        return PacedStage(forward_s=self.forward_s / v, backward_s=self.backward_s / v)

    def inputs(self) -> torch.Tensor:
        """A batch of M activations of message_bytes each, float32."""
        return torch.zeros(self.microbatches, self.message_bytes // 4)


def fullbore_step(schedule: Schedule, setting: Setting, rank: int) -> Step:
    """A step of ours."""
    stages = {s: setting.stage(schedule) for s in schedule.placement.stages_of(rank)}
    pipe = Pipeline(stages, schedule, paced_loss)
    x = setting.inputs()
    return lambda: void(pipe.step(x, x))


class _InHalves(torch.autograd.Function):
    """Its node is called once for each half of torch's split backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, half_s: float) -> torch.Tensor:
        ctx.half_s = half_s
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        end_s = time.perf_counter() + ctx.half_s
        result = torch.empty_like(gradient), torch.zeros(1), None
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result


class TorchSplitStage(nn.Module):
    """As PacedStage, for torch's own way to split a backward; there must be a weight."""

    def __init__(self, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._forward_s, self._half_s = forward_s, backward_s / 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end_s = time.perf_counter() + self._forward_s
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        result: torch.Tensor = _InHalves.apply(x, self.weight, self._half_s)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return result


def torch_step(schedule: Schedule, setting: Setting, rank: int) -> Step:
    """A step of torch.distributed.pipelining's schedule of the same name."""
    kinds: dict[str, Any] = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "1f1b": torch_schedules.Schedule1F1B,
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
        "zb-v": torch_schedules.ScheduleZBVZeroBubble,
    }
    device, x = torch.device("cpu"), setting.inputs()
    paced = TorchSplitStage if schedule.splits_backward else PacedStage
    seconds = setting.seconds(schedule)
    held = schedule.placement.stages_of(rank)
    stages = [
        PipelineStage(
            paced(forward_s=seconds[Kind.F], backward_s=seconds[Kind.B]),
            s,
            schedule.stages,
            device,
        )
        for s in held
    ]
    given = stages if schedule.virtual_stages > 1 else stages[0]
    made = kinds[schedule.name](given, setting.microbatches, loss_fn=paced_loss)
    first, last = 0 in held, schedule.stages - 1 in held

    def step() -> None:
        made.step(*([x] if first else []), **({"target": x, "losses": []} if last else {}))

    return step


class Bare:
    """A rank's order of actions over bare messages: every receive is posted before the first."""

    def __init__(self, schedule: Schedule, setting: Setting, rank: int) -> None:
        self._program = insert_communication(schedule).programs[rank]
        self._rank, self._rank_of = rank, schedule.placement.stage_to_rank
        self._width = setting.message_bytes // 4
        self._groups = {
            (a, b): dist.new_group([a, b])
            for a in range(setting.ranks)
            for b in sorted({(a - 1) % setting.ranks, (a + 1) % setting.ranks} - {a})
        }

    def _peer(self, action: Action) -> int:
        up = action.kind in (Kind.RECV_F, Kind.SEND_B)
        return self._rank_of[action.stage + (-1 if up else 1)]

    def step(self, compute: Compute) -> None:
        """compute: runs an action, given what has arrived; what it returns the next send sends."""
        dist.barrier()
        rank, groups = self._rank, self._groups
        output, arrived = torch.empty(0), Arrived()
        posted = {
            action: (buffer, dist.irecv(buffer, peer, group=groups[peer, rank]))
            for action in self._program
            if action.kind in (Kind.RECV_F, Kind.RECV_B)
            for peer, buffer in [(self._peer(action), torch.empty(self._width))]
        }
        sends = []
        for action in self._program:
            if action in posted:
                buffer, work = posted[action]
                work.wait()
                arrived[action] = buffer
            elif action.kind in (Kind.SEND_F, Kind.SEND_B):
                peer = self._peer(action)
                sends.append(dist.isend(output, peer, group=groups[rank, peer]))
            else:
                output = compute(action, arrived)
        for send in sends:
            send.wait()


def floor_step(schedule: Schedule, setting: Setting, rank: int) -> Step:
    """Sleeps and bare messages."""
    bare, seconds = Bare(schedule, setting, rank), setting.seconds(schedule)
    output = torch.zeros(setting.message_bytes // 4)

    def compute(action: Action, _: Arrived) -> torch.Tensor:
        time.sleep(seconds[action.kind])
        return output

    return lambda: bare.step(compute)


def autograd_step(schedule: Schedule, setting: Setting, rank: int) -> Step:
    """Bare messages, the stages called and `torch.autograd.backward`: what no engine can leave out.

    For schedules with whole backwards in which no two neighbouring stages share a rank.
    """
    bare, x = Bare(schedule, setting, rank), setting.inputs()
    stages = {s: setting.stage(schedule) for s in schedule.placement.stages_of(rank)}
    last, kept = schedule.stages - 1, dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]()

    def forward(stage: int, microbatch: int, arrived: Arrived) -> torch.Tensor:
        key = Action(stage=stage, kind=Kind.RECV_F, microbatch=microbatch)
        given = (arrived.pop(key) if stage else x[microbatch].clone()).requires_grad_()
        output = stages[stage](given)
        kept[stage, microbatch] = given, paced_loss(output, None) if stage == last else output
        return output.detach()

    def backward(stage: int, microbatch: int, arrived: Arrived) -> torch.Tensor:
        given, output = kept.pop((stage, microbatch))
        key = Action(stage=stage, kind=Kind.RECV_B, microbatch=microbatch)
        torch.autograd.backward(output, None if stage == last else arrived.pop(key))
        assert given.grad is not None
        return given.grad

    def compute(action: Action, arrived: Arrived) -> torch.Tensor:
        run = forward if action.kind == Kind.F else backward
        return run(action.stage, action.microbatch, arrived)

    return lambda: bare.step(compute)


def void(_: object) -> None:
    """Drop a result at once."""


def deepspeed_step(schedule: Schedule, setting: Setting, rank: int) -> Step:
    """A step of DeepSpeed's; the order of its actions is its own."""
    step = deepspeed_steps.deepspeed_step(setting.stage(schedule), setting.ranks, setting.inputs())
    return lambda: void(step())


MAKERS = {
    "fullbore": fullbore_step,
    "torch": torch_step,
    "deepspeed": deepspeed_step,
    "autograd": autograd_step,
    "floor": floor_step,
}


def takes_part(engine: str, schedule: str) -> bool:
    """Whether an engine is here and knows the schedule."""
    if engine == "deepspeed":
        return schedule in deepspeed_steps.SCHEDULES and deepspeed_steps.is_installed()
    return engine != "autograd" or schedule != "zb-v"


def measure(rank: int, setting: Setting) -> dict[str, list[float]]:
    """Step times in seconds by engine and schedule, barrier to barrier, engines taking turns."""
    made = {
        (engine, name): maker(setting.schedule(name), setting, rank)
        for name in setting.names
        for engine, maker in MAKERS.items()
        if takes_part(engine, name)
    }
    times: dict[str, list[float]] = {}
    for round_ in range(setting.rounds + 1):
        for (engine, name), step in made.items():
            for _ in range(setting.steps):
                dist.barrier()
                begun_s = time.perf_counter()
                step()
                dist.barrier()
                if round_:  # the first round warms up
                    took_s = time.perf_counter() - begun_s
                    times.setdefault(f"{engine} {name}", []).append(took_s)
    return times


def rows_of(setting: Setting, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each schedule and engine; theory: simulated, with messages that cost nothing."""
    rows = []
    busy_s = setting.microbatches * (setting.forward_s + setting.backward_s)
    for name, engine in product(setting.names, MAKERS):
        if not takes_part(engine, name):
            continue
        schedule = setting.schedule(name)
        seconds = setting.seconds(schedule)
        costs = Costs.uniform(
            stages=schedule.stages,
            forward_s=seconds[Kind.F],
            input_grad_s=seconds[Kind.I],
            weight_grad_s=seconds[Kind.W],
        )
        actions = sum(int((p.kind < Kind.SEND_F).sum()) for p in schedule.programs)
        ideal = summarize(simulate(schedule, costs), schedule)
        step_s = statistics.median(times[f"{engine} {name}"])
        bubble = 1 - busy_s / step_s
        rows.append(
            {
                "ranks": setting.ranks,
                "microbatches": setting.microbatches,
                "message_bytes": setting.message_bytes,
                "schedule": name,
                "engine": engine,
                "step_s": step_s,
                "bubble_fraction": bubble,
                "theory": ideal.bubble_fraction,
                "points_above_theory": 100 * (bubble - ideal.bubble_fraction),
                "excess_us_an_action": 1e6
                * (step_s - ideal.makespan_s)
                / (actions / setting.ranks),
            }
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("-p", "--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("-m", "--microbatches", type=int, nargs="+", default=[16])
    parser.add_argument("--message-kib", type=int, nargs="+", default=[64])
    parser.add_argument("--forward-ms", type=float, default=10.0, help="a rank and microbatch")
    parser.add_argument("--backward-ms", type=float, default=20.0, help="a rank and microbatch")
    parser.add_argument("--steps", type=int, default=4, help="steps in a row of one engine")
    parser.add_argument("--rounds", type=int, default=3, help="how often all engines take turns")
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved"])


def main(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every combination of P, M and message size; print as they come."""
    rows: list[dict[str, Any]] = []
    print(" P   M    KiB  schedule     engine       step   bubble  above theory   over simulated")
    for ranks, m, kib in product(given.ranks, given.microbatches, given.message_kib):
        setting = Setting(
            ranks=ranks,
            microbatches=m,
            forward_s=given.forward_ms / 1e3,
            backward_s=given.backward_ms / 1e3,
            message_bytes=kib * 1024,
            steps=given.steps,
            rounds=given.rounds,
            names=tuple(given.schedules),
        )
        for row in rows_of(setting, pool.run(ranks, measure, setting)[0]):
            rows.append(row)
            print(
                f"{ranks:2} {m:3} {kib:6}  {row['schedule']:12} {row['engine']:9} "
                f"{row['step_s'] * 1e3:7.1f} ms {row['bubble_fraction']:6.1%} "
                f"{row['points_above_theory']:9.1f} pt {row['excess_us_an_action']:8.0f} us/action",
                flush=True,
            )
    return rows
