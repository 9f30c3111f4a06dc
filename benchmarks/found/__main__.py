"""A schedule searched with measured costs, beside the named ones: `python benchmarks/found PART`.

Three steps, each a command of `fullbore` that is printed as it is run: `compare` measures what the
actions of the named schedules cost, `search` looks for a schedule within 1F1B's memory, with those
of ZB-V (two stages a rank, halves of the backward) and interleaved 1F1B (whole backwards), and a
second `compare` runs all of them.

    paced     eight ranks that sleep 10 + 20 ms a microbatch, M = 32, everything else real
    smollm2   SmolLM2-135M on two ranks and real text, M = 8

Exit status 1 where the order of two schedules by measured step time is not that by predicted time,
though their predictions differ by more than 3 %, or where a named schedule is faster than the one
found by more than a step of the same schedule differs from another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMED = "1f1b,eager-1f1b,interleaved,zb-h1,zb-v,gis"
PARTS = {
    "paced": "--paced -p 8 -m 32 --forward-s 0.010 --backward-s 0.020",
    "smollm2": "--model smollm2 --data stdlib -p 2 -m 8 --seq-length 64 --lr 5e-5",
}
TELLING = 0.03  # how far predictions must be apart for their order to mean something


def main() -> None:
    """Measure, search, measure; print the table."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int, default=6, help="of each; the first is warm-up")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds of the search")
    parser.add_argument("--keep", type=Path, help="a folder for everything that is written")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(given, given.keep or Path(folder)))


def run(given: argparse.Namespace, folder: Path) -> int:
    job = [*PARTS[given.part].split(), "--steps", str(given.steps)]
    ranks, microbatches = job[job.index("-p") + 1], job[job.index("-m") + 1]
    first, second, csv = folder / "first", folder / "second", folder / "found.csv"
    fullbore("compare", *job, "--schedules", NAMED, "--output", first)
    costs = folder / "costs.json"
    costs.write_text(json.dumps(joined(first)))
    size = ("-p", ranks, "-m", microbatches, "--memory-limit", "1x")
    limit = ("--time-limit", f"{given.time_limit:g}")
    print(fullbore("search", "--costs", costs, *size, *limit, "-o", csv))
    schedules = f"{NAMED},{csv}"
    print(fullbore("compare", *job, "--schedules", schedules, "--output", second))
    return judge(json.loads((second / "report.json").read_text())["schedules"])


def joined(first: Path) -> dict[str, Any]:
    """ZB-V's costs, with what a whole backward of each stage took in the interleaved schedule.

    Whole it is a little quicker than its halves together; both cut the model alike.
    """
    halves, whole = (
        json.loads((first / f"costs-{name}.json").read_text()) for name in ("zb-v", "interleaved")
    )
    for stage, other in zip(halves["stages"], whole["stages"], strict=True):
        stage["backward_s"] = other["backward_s"]
    return dict(halves)


def fullbore(*arguments: object) -> str:
    """The output of one command, which is told on stderr."""
    words = [str(argument) for argument in arguments]
    print("+ fullbore", shlex.join(words), file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "fullbore", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def judge(found: list[dict[str, Any]]) -> int:
    """Print what does not hold."""
    wrong = []
    for one, other in itertools.combinations(found, 2):
        predicted, measured = (
            other[side]["step_s"] / one[side]["step_s"] for side in ("predicted", "measured")
        )
        apart = max(predicted, 1 / predicted) - 1
        if apart > TELLING and (predicted > 1) != (measured > 1):
            names = f"{one['schedule']} and {other['schedule']}"
            wrong.append(f"{names}: predicted {predicted:.3f}, measured {measured:.3f}")
    best = min(found[:-1], key=lambda one: one["measured"]["step_s"])
    mine = found[-1]["measured"]["step_s"]
    spread = statistics.stdev([step["step_s"] for step in found[-1]["steps"]])
    if mine > best["measured"]["step_s"] + spread:
        wrong.append(f"{best['schedule']} is faster by {mine / best['measured']['step_s'] - 1:.1%}")
    print("\n".join(["", *(f"missed: {line}" for line in wrong)]))
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
