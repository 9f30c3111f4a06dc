"""How fast the simulator is, and that its cost grows linearly with the actions of a schedule.

python benchmarks/simulator/simulator.py [--help]

Goal: P=64, v=4, M=1024 simulated within 2 s on one core, after warm-up. The second table holds P
and v and doubles M; the last column would grow if the cost were not linear. Everything runs on one
core where the system can pin a process.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.ir import Schedule
from fullbore.sim import simulate
from fullbore.timeline import critical_path, summarize

GOAL_S = 2.0


def main() -> None:
    """Print both tables; exit status 1 where the goal is missed at its own size."""
    args = arguments()
    print(machine(pinned=pin()))
    size = {"ranks": args.ranks, "virtual_stages": args.virtual_stages}
    schedule = schedules.interleaved(**size, microbatches=args.microbatches)
    costs = Costs.uniform(stages=schedule.stages, hop_s=0.01)
    first_s = seconds(lambda: simulate(schedule, costs))
    print(
        f"first simulation, numba's import and the kernel's compilation included: {first_s:.2f} s"
    )
    simulated_s = headline(schedule, costs, runs=args.runs)
    print()
    scaling(size, largest=args.microbatches, runs=args.runs)
    at_goal = (args.ranks, args.virtual_stages, args.microbatches) == (64, 4, 1024)
    if at_goal and simulated_s > GOAL_S:
        sys.exit(f"slower than the goal of {GOAL_S} s")


def arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0], epilog=" ".join(lines[4:]))
    parser.add_argument("--ranks", type=int, default=64, help="P (default 64)")
    parser.add_argument("--virtual-stages", type=int, default=4, help="v (default 4)")
    parser.add_argument("--microbatches", type=int, default=1024, help="largest M (default 1024)")
    parser.add_argument("--runs", type=int, default=5, help="runs a figure (default 5)")
    return parser.parse_args()


def pin() -> bool:
    """Keep this process on one core, where the system lets it."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return True


def machine(*, pinned: bool) -> str:
    """The machine in words: processor, cores, versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = [s for s in cpuinfo.read_text().splitlines() if s.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba"))
    return (
        f"machine: {model}, {os.cpu_count()} cores, {'pinned to one' if pinned else 'not pinned'}, "
        f"{platform.system()}, Python {platform.python_version()}, {packages}"
    )


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def headline(schedule: Schedule, costs: Costs, *, runs: int) -> float:
    """Print what each step of a prediction takes at the goal's size; the simulation's median."""
    timeline = simulate(schedule, costs)
    ranks, v = schedule.ranks, schedule.virtual_stages
    print(
        f"interleaved, P={ranks}, v={v}, M={schedule.microbatches}: "
        f"{schedule.actions:,} actions, {len(timeline):,} spans; median of {runs} runs"
    )
    size = {"ranks": ranks, "virtual_stages": v, "microbatches": schedule.microbatches}
    steps: dict[str, Callable[[], object]] = {
        "generate": lambda: schedules.interleaved(**size),
        "simulate": lambda: simulate(schedule, costs),
        "summarize": lambda: summarize(timeline, schedule),
        "critical path": lambda: critical_path(timeline, schedule),
    }
    medians_s = {
        name: statistics.median(seconds(work) for _ in range(runs)) for name, work in steps.items()
    }
    for name, median_s in medians_s.items():
        print(f"  {name:14} {median_s:7.3f} s")
    return medians_s["simulate"]


def scaling(size: dict[str, int], *, largest: int, runs: int) -> None:
    """Print the cost of an action as M doubles."""
    print(f"{'M':>6} {'actions':>10} {'simulate s':>11} {'ns an action':>13}")
    for microbatches in [m for m in (largest // 2**k for k in range(6, -1, -1)) if m > 0]:
        schedule = schedules.interleaved(**size, microbatches=microbatches)
        costs = Costs.uniform(stages=schedule.stages, hop_s=0.01)
        taken_s = statistics.median(
            seconds(lambda s=schedule, c=costs: simulate(s, c)) for _ in range(runs)
        )
        print(
            f"{microbatches:>6} {schedule.actions:>10,} {taken_s:>11.4f} "
            f"{taken_s / schedule.actions * 1e9:>13.0f}"
        )


if __name__ == "__main__":
    main()
