"""How close to theory does the bubble come when everything but the arithmetic is real?

Each stage's compute is a sleep of known length; processes, messages, autograd and the engine are
real. Fullbore and torch.distributed.pipelining run in turn in one pool of processes, and so does
the floor: the same order of actions over bare isend and irecv, each receive posted in advance.

    python benchmarks/paced_bubble/paced_bubble.py            # P = 8, M = 16, 64 KiB
    python benchmarks/paced_bubble/paced_bubble.py --help

Sleeping ranks take no core, so that 8 ranks can share two; what their messages and wake-ups cost
there is part of the result. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.ir import Kind, Schedule
from fullbore.passes import insert_communication
from fullbore.runtime import PacedStage, Pipeline, paced_loss, wake_on_time
from fullbore.sim import simulate
from fullbore.timeline import summarize

Step = Callable[[], None]


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


def build(name: str, setting: Setting) -> Schedule:
    """The schedule; two virtual stages where it interleaves."""
    return schedules.build(
        name,
        ranks=setting.ranks,
        microbatches=setting.microbatches,
        virtual_stages=2 if name == "interleaved" else None,
    )


def stage_of(schedule: Schedule, setting: Setting) -> PacedStage:
    """A stage that sleeps its share of the rank's time."""
    v = schedule.virtual_stages
    return PacedStage(forward_s=setting.forward_s / v, backward_s=setting.backward_s / v)


def inputs_of(setting: Setting) -> torch.Tensor:
    """A batch of M activations of message_bytes each, float32."""
    return torch.zeros(setting.microbatches, setting.message_bytes // 4)


def fullbore_step(schedule: Schedule, setting: Setting, rank: int) -> Step:
    """A step of ours."""
    stages = {s: stage_of(schedule, setting) for s in schedule.placement.stages_of(rank)}
    pipe = Pipeline(stages, schedule, paced_loss)
    x = inputs_of(setting)
    return lambda: void(pipe.step(x, x))


def torch_step(schedule: Schedule, setting: Setting, rank: int) -> Step:
    """A step of torch.distributed.pipelining's schedule of the same name."""
    kinds: dict[str, Any] = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "1f1b": torch_schedules.Schedule1F1B,
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    }
    device, x = torch.device("cpu"), inputs_of(setting)
    stages = [
        PipelineStage(stage_of(schedule, setting), s, schedule.stages, device)
        for s in schedule.placement.stages_of(rank)
    ]
    given = stages if schedule.name == "interleaved" else stages[0]
    made = kinds[schedule.name](given, setting.microbatches, loss_fn=paced_loss)
    first, last = rank == 0, rank == setting.ranks - 1

    def step() -> None:
        made.step(*([x] if first else []), **({"target": x, "losses": []} if last else {}))

    return step


def floor_step(schedule: Schedule, setting: Setting, rank: int) -> Step:
    """The same actions as sleeps and bare messages: every receive is posted before the first."""
    program = insert_communication(schedule).programs[rank]
    v, width = schedule.virtual_stages, setting.message_bytes // 4
    groups = {
        (a, b): dist.new_group([a, b])
        for a in range(setting.ranks)
        for b in ((a - 1) % setting.ranks, (a + 1) % setting.ranks)
        if a != b
    }
    rank_of = schedule.placement.stage_to_rank
    seconds = {Kind.F: setting.forward_s / v, Kind.B: setting.backward_s / v}
    output = torch.zeros(width)

    def peer(action: Any) -> int:
        up = action.kind in (Kind.RECV_F, Kind.SEND_B)
        return rank_of[action.stage + (-1 if up else 1)]

    def step() -> None:
        dist.barrier()
        receives = {
            action: dist.irecv(torch.empty(width), peer(action), group=groups[peer(action), rank])
            for action in program
            if action.kind in (Kind.RECV_F, Kind.RECV_B)
        }
        sends = []
        for action in program:
            if action.kind in seconds:
                time.sleep(seconds[action.kind])
            elif action in receives:
                receives[action].wait()
            else:
                sends.append(dist.isend(output, peer(action), group=groups[rank, peer(action)]))
        for send in sends:
            send.wait()

    return step


def void(_: object) -> None:
    """Drop a result at once."""


MAKERS = {"fullbore": fullbore_step, "torch": torch_step, "floor": floor_step}


def run_rank(rank: int, setting: Setting, names: list[str], store: str, result: str) -> None:
    """One process: every engine and schedule in turn, several rounds."""
    torch.set_num_threads(1)
    wake_on_time()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, setting.ranks),
        rank=rank,
        world_size=setting.ranks,
        timeout=timedelta(seconds=120),
    )
    made = {
        (engine, name): maker(build(name, setting), setting, rank)
        for name in names
        for engine, maker in MAKERS.items()
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
    if rank == 0:
        with open(result, "w", encoding="utf-8") as file:
            json.dump(times, file)
    dist.barrier()
    os._exit(0)  # without the groups' slow farewell


def measure(setting: Setting, names: list[str]) -> dict[str, list[float]]:
    """Step times in seconds by engine and schedule, barrier to barrier on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        store, result = os.path.join(folder, "store"), os.path.join(folder, "times.json")
        torch.multiprocessing.spawn(
            run_rank, args=(setting, names, store, result), nprocs=setting.ranks
        )
        with open(result, encoding="utf-8") as file:
            times: dict[str, list[float]] = json.load(file)
            return times


def theory(name: str, setting: Setting) -> tuple[float, float]:
    """Simulated step time in seconds, and bubble fraction, with messages that cost nothing."""
    schedule = build(name, setting)
    v = schedule.virtual_stages
    costs = Costs.uniform(
        stages=schedule.stages, forward_s=setting.forward_s / v, backward_s=setting.backward_s / v
    )
    summary = summarize(simulate(schedule, costs), schedule)
    return summary.makespan_s, summary.bubble_fraction


def report(
    setting: Setting, names: list[str], times: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """A row for each schedule and engine."""
    rows = []
    busy_s = setting.microbatches * (setting.forward_s + setting.backward_s)
    for name in names:
        ideal_s, bubble = theory(name, setting)
        actions = 2 * setting.microbatches * build(name, setting).virtual_stages
        for engine in MAKERS:
            step_s = statistics.median(times[f"{engine} {name}"])
            rows.append(
                {
                    "schedule": name,
                    "engine": engine,
                    "step_s": step_s,
                    "bubble_fraction": 1 - busy_s / step_s,
                    "points_above_theory": 100 * (1 - busy_s / step_s - bubble),
                    "theory": bubble,
                    "excess_us_an_action": 1e6 * (step_s - ideal_s) / actions,
                }
            )
    return rows


def machine() -> str:
    """What the figures were taken on."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-p", "--ranks", type=int, default=8)
    parser.add_argument("-m", "--microbatches", type=int, default=16)
    parser.add_argument("--forward-ms", type=float, default=10.0, help="a rank and microbatch")
    parser.add_argument("--backward-ms", type=float, default=20.0, help="a rank and microbatch")
    parser.add_argument("--message-kib", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="steps in a row of one engine")
    parser.add_argument("--rounds", type=int, default=3, help="how often all engines take turns")
    parser.add_argument("--schedules", default="gpipe,1f1b,interleaved")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    setting = Setting(
        ranks=given.ranks,
        microbatches=given.microbatches,
        forward_s=given.forward_ms / 1e3,
        backward_s=given.backward_ms / 1e3,
        message_bytes=given.message_kib * 1024,
        steps=given.steps,
        rounds=given.rounds,
    )
    names = given.schedules.split(",")
    where = machine()
    rows = report(setting, names, measure(setting, names))
    if given.json:
        print(json.dumps({"machine": where, "rows": rows}, indent=2))
        return
    print(where)
    print("schedule     engine         step   bubble   theory    above  over the simulated time")
    for row in rows:
        print(
            f"{row['schedule']:12} {row['engine']:9} {row['step_s'] * 1e3:6.1f} ms "
            f"{row['bubble_fraction']:8.1%} {row['theory']:8.1%} "
            f"{row['points_above_theory']:5.1f} pt {row['excess_us_an_action']:6.0f} us/action"
        )


if __name__ == "__main__":
    main()
