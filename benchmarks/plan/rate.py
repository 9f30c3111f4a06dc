"""How many candidates a second the planner evaluates, each with a full simulation of its schedule.

python benchmarks/plan/rate.py [--help]

Goal: 1000 a second on two cores for P=8, M=64. A candidate is a spread, a schedule, a split of the
layers that no other candidate has, and a recomputation: its stages are summed, its memory is
followed through the whole schedule and its step simulated, one process on one core. Prices of the
layers and the schedules are made beforehand, as a planner shares them too; nothing is pruned.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fullbore.cost.hardware import Cluster
from fullbore.cost.model import Recompute
from fullbore.cost.model.config import read_config
from fullbore.cost.model.hugging_face import shape_of
from fullbore.plan import Choice, Evaluator, Fixed, Question
from fullbore.plan.space import choices, spreads

GOAL = 1000.0
CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "llama3-70b"


def main() -> None:
    """Print the rate by schedule and in all; exit status 1 where the goal is missed."""
    args = arguments()
    question = Question(
        shape=shape_of(read_config(args.model)),
        cluster=Cluster.parse("h100:8x8"),
        global_batch=64,
        sequence=4096,
        fixed=Fixed(pipeline=(8,), tensor=(8,), microbatch_size=(1,)),
    )
    (spread,) = spreads(question)
    print(f"{platform.machine()}, {os.cpu_count()} cores, one process; Python {sys.version[:6]}")
    print(f"P={spread.pipeline}, M={spread.microbatches}, {len(question.shape.layers)} layers\n")
    evaluator, drawn = Evaluator(question), random.Random(0)
    total, total_s, cpu_s, actions = 0, 0.0, 0.0, 0
    print("schedule        v   G  actions  candidates/s")
    for choice in choices(question, spread):
        tried = list(several(evaluator, choice, drawn, args.number))
        evaluator.evaluate(tried[0])
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for one in tried:
            evaluator.evaluate(one)
        spent_s = time.perf_counter() - begin_s
        cpu_s += time.process_time() - begin_cpu_s
        size = evaluator.programs.of(choice).rehearsal.actions
        total, total_s, actions = total + len(tried), total_s + spent_s, actions + size * len(tried)
        group = "" if choice.group is None else str(choice.group)
        print(
            f"{choice.schedule:14} {choice.virtual_stages:2}  {group:>2}  {size:7}  "
            f"{len(tried) / spent_s:12,.0f}"
        )
    rate = total / total_s
    print(
        f"\nall: {rate:,.0f} candidates/s, {actions / total:,.0f} actions each; "
        f"{total / cpu_s:,.0f} for each second of one core"
    )
    if rate < GOAL:
        sys.exit(f"slower than the goal of {GOAL:,.0f} a second")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=CONFIG, help="a config.json or its folder")
    parser.add_argument("--number", type=int, default=200, help="candidates a schedule (200)")
    return parser.parse_args()


def several(
    evaluator: Evaluator, choice: Choice, drawn: random.Random, number: int
) -> Iterator[Choice]:
    """The choice with layers moved at random, and something recomputed or not."""
    made = evaluator.with_layers(choice)
    assert made.layers is not None
    for _ in range(number):
        layers = list(made.layers)
        for _ in range(3):
            source, target = drawn.sample(range(len(layers)), 2)
            if layers[source] > 1:
                layers[source] -= 1
                layers[target] += 1
        what = drawn.choice([Recompute(), Recompute(granularity="full")])
        yield replace(made, layers=tuple(layers), recompute=what)


if __name__ == "__main__":
    main()
