"""Predictions beside published measurements: `python benchmarks/published [fit]`.

Prints a row for each published figure, its error, and the means; exit status 1 where a goal is
missed. Goals: bubbles to four decimals; memory within 10 %; step times of each generation within
10 % on average and 15 % at worst, over the rows that nothing was fitted to. Mixtures of experts are
printed and not judged: nothing of theirs is fitted, and they miss. `fit` prints what the constants
of src/fullbore/cost/hardware/constants come to when they are fitted again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fit import FITTED, refit
from jobs import Job, jobs
from predict import activations_gb, bubble, predict

from fullbore.cli.figures import counted
from fullbore.cli.output import table

MEMORY_GOAL, MEAN_GOAL, WORST_GOAL = 0.10, 0.10, 0.15
GENERATIONS = {"a100": "A100", "h100": "H100", "b200": "B200", "gb200": "GB200"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure: predicted, published, and whether constants were fitted to it."""

    job: Job
    predicted: float
    published: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """predicted / published - 1."""
        return self.predicted / self.published - 1


def main() -> None:
    """Print the three tables and the summary."""
    if sys.argv[1:] == ["fit"]:
        refit()
        return
    found = list(jobs())
    good = [_bubbles(found), _memory(found), *_steps(found)]
    print("\nevery goal is met" if all(good) else "\na goal is MISSED")
    sys.exit(0 if all(good) else 1)


def _bubbles(found: Sequence[Job]) -> bool:
    """Where times and schedule are known, the span bubble has the printed decimals."""
    rows, wrong = [], 0
    for job in found:
        printed = job.measured.bubble
        if printed is None or job.printed in ("ZB-1p", "ZB-2p"):
            continue
        simulated = f"{bubble(job):.4f}"
        wrong += simulated != printed
        rows.append([job.table, job.name, simulated, printed, "" if simulated == printed else "!"])
    print("Bubbles of given times (ZB-1p and ZB-2p are found by search: benchmarks/search)\n")
    print(table(["table", "row", "simulated", "published", ""], rows))
    print(f"\n{len(rows) - wrong} of {len(rows)} to four decimals\n")
    return wrong == 0


def _memory(found: Sequence[Job]) -> bool:
    lines = []
    for job in found:
        if job.measured.memory_gb is not None:
            alone = job.measured.activations_only
            held = activations_gb(job) if alone else predict(job).memory_gb
            lines.append(Line(job=job, predicted=held, published=job.measured.memory_gb))
    print("Memory of the fullest rank, GB of 1e9 bytes (PipeOffload: activations alone)\n")
    return _told(lines, ".1f", mean_goal=MEMORY_GOAL, worst_goal=MEMORY_GOAL)


def _steps(found: Sequence[Job]) -> list[bool]:
    good = []
    for preset, title in GENERATIONS.items():
        lines = _timed(job for job in found if job.gpu == preset and not job.mixture)
        print(f"\nSeconds of a step on {title} (* constants were fitted to this row)\n")
        good.append(_told(lines, ".3f", mean_goal=MEAN_GOAL, worst_goal=WORST_GOAL))
    print("\nSeconds of a step of a mixture of experts (not judged)\n")
    _told(_timed(job for job in found if job.mixture), ".3f", mean_goal=1.0, worst_goal=1.0)
    return good


def _timed(found: Iterable[Job]) -> list[Line]:
    return [
        Line(
            job=job,
            predicted=predict(job).step_s,
            published=job.measured.step_s,
            fitted=(job.table, job.name) in FITTED,
        )
        for job in found
        if job.measured.step_s is not None
    ]


def _told(lines: Sequence[Line], digits: str, *, mean_goal: float, worst_goal: float) -> bool:
    """Print lines and summary; whether the goals are met by rows that nothing was fitted to."""
    rows = [
        [
            line.job.table,
            f"{line.job.name}{' *' if line.fitted else ''}",
            format(line.predicted, digits),
            format(line.published, digits),
            f"{line.error * 100:+.1f} %",
        ]
        for line in lines
    ]
    print(table(["table", "row", "predicted", "published", "error"], rows))
    errors = [abs(line.error) for line in lines if not line.fitted]
    mean, worst = sum(errors) / len(errors), max(errors)
    told = f"{mean:.1%} off on average, {worst:.1%} at worst"
    if worst_goal < 1:
        told += f"; goals {mean_goal:.0%} and {worst_goal:.0%}"
    print(f"\n{counted(len(errors), 'row')} not fitted to: {told}")
    return mean <= mean_goal and worst <= worst_goal


if __name__ == "__main__":
    main()
