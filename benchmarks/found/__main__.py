"""A schedule searched with measured costs, beside the named ones: `python benchmarks/found PART`.

Each step is a command of `fullbore` that is printed as it is run: `compare` measures what the
actions of the named schedules cost, `search` looks for a schedule within 1F1B's memory and for one
within twice that, with the costs of those that have two stages a rank, and for a proof that nothing
is better where the schedule is small; a second `compare` runs all of them.

    paced     eight ranks that sleep 10 + 20 ms a microbatch, M = 32, everything else real
    smollm2   SmolLM2-135M on two ranks and real text, M = 8

Exit status 1 where the order of two schedules by measured step time is not that by predicted time,
though their predictions differ by more than 3 %, or where a named schedule is faster than one found
that may hold as much, by more than a step of the same schedule differs from another.
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
PROOFS = {"paced": [], "smollm2": ["--prove", "60"]}  # what is too large is not proved
LIMITS = {"found-1x": "1x", "found-2x": "2x"}  # of what 1F1B holds, by the name of what is found
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
    if given.steps < 3:
        parser.error("--steps: at least 3, so that two steps that are measured can differ")
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(given, given.keep or Path(folder)))


def run(given: argparse.Namespace, folder: Path) -> int:
    job = [*PARTS[given.part].split(), "--steps", str(given.steps)]
    ranks, microbatches = job[job.index("-p") + 1], job[job.index("-m") + 1]
    first, second = folder / "first", folder / "second"
    fullbore("compare", *job, "--schedules", NAMED, "--output", first)
    costs = folder / "costs.json"
    costs.write_text(json.dumps(joined(first)))
    effort = ("--time-limit", f"{given.time_limit:g}", *PROOFS[given.part])
    for name, limit in LIMITS.items():
        csv = folder / f"{name}.csv"
        sought = ("--costs", costs, "-p", ranks, "-m", microbatches, "--memory-limit", limit)
        print(fullbore("search", *sought, *effort, "-o", csv))
    schedules = ",".join([NAMED, *(str(folder / f"{name}.csv") for name in LIMITS)])
    print(fullbore("compare", *job, "--schedules", schedules, "--output", second))
    return judge(json.loads((second / "report.json").read_text())["schedules"])


def joined(first: Path) -> dict[str, Any]:
    """ZB-V's costs, with forwards and whole backwards as the median of those schedules that have
    them and cut the model alike.

    Whole, a backward is a little quicker than its halves together.
    """
    halves, *others = (
        json.loads((first / f"costs-{name}.json").read_text())
        for name in ("zb-v", "interleaved", "gis")
    )
    for index, stage in enumerate(halves["stages"]):
        alike = [other["stages"][index] for other in others]
        stage["forward_s"] = statistics.median(one["forward_s"] for one in [stage, *alike])
        stage["backward_s"] = statistics.median(one["backward_s"] for one in alike)
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
    named = [one for one in found if one["schedule"] not in LIMITS]
    for mine in (one for one in found if one["schedule"] in LIMITS):
        fitting = [one for one in named if most(one) <= most(named[0]) * limit_of(mine)]
        best = min(fitting, key=lambda one: one["measured"]["step_s"])
        slower = mine["measured"]["step_s"] - best["measured"]["step_s"]
        if slower > statistics.stdev(step["step_s"] for step in mine["steps"]):
            wrong.append(
                f"{best['schedule']} is faster than {mine['schedule']} by "
                f"{slower / mine['measured']['step_s']:.1%}"
            )
    print("\n".join(["", *(f"missed: {line}" for line in wrong)]))
    return 1 if wrong else 0


def most(schedule: dict[str, Any]) -> float:
    """What its fullest rank holds at once, in microbatches of 1/P of the model."""
    return max(schedule["predicted"]["peak_activations"])


def limit_of(found: dict[str, Any]) -> float:
    """What it may hold, of what 1F1B holds."""
    return float(LIMITS[found["schedule"]].removesuffix("x"))


if __name__ == "__main__":
    main()
