"""`fullbore search`: the best schedule for given costs and memory, and a bound on any other."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fullbore.cli.options import JsonFlag
from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.cli.prediction import Prediction
    from fullbore.cost import Costs
    from fullbore.search import Found, Job, Progress

__all__ = ["search"]

_JOB = "What is searched for"
_EFFORT = "How long"
_RESULT = "Result"

EXAMPLES = """\
Find the order of forwards and backwards that ends soonest.

Give the costs of the finest cut you can run: with stages for 2 P or 4 P, placements with two or
four stages a rank are tried, too (looped, V and wave), and 1F1B's with neighbours joined.
Split the backward in the costs (input_grad_s, weight_grad_s) wherever it can be split.

The search starts from every named schedule that fits and stops when the time is up, the schedule
is as good as the lower bound, or you press Ctrl-C; the best so far is kept. The lower bound is a
proof: no schedule of the placements tried can be faster (docs/search.md).

  fullbore search --costs costs.json -p 8 -m 32 --memory-limit 1x -o best.csv
"""


def search(
    *,
    costs: Annotated[
        Path,
        typer.Option(
            "--costs",
            metavar="FILE",
            help="A JSON file with the costs of each stage (docs/costs.md).",
            rich_help_panel=_JOB,
            show_default=False,
        ),
    ],
    ranks: Annotated[
        int,
        typer.Option(
            "--pipeline-model-parallel-size",
            "-p",
            metavar="P",
            help="Pipeline ranks.",
            rich_help_panel=_JOB,
            show_default=False,
        ),
    ],
    microbatches: Annotated[
        int,
        typer.Option(
            "--num-microbatches",
            "-m",
            metavar="M",
            help="Microbatches a step.",
            rich_help_panel=_JOB,
            show_default=False,
        ),
    ],
    virtual_stages: Annotated[
        str | None,
        typer.Option(
            "--num-virtual-stages-per-pipeline-rank",
            "--virtual-stages",
            "-v",
            metavar="V,...",
            help="Stages a rank to try, such as 1,2,4. A stage of the costs is taken to split "
            "evenly where that is needed. If not given: every number into which the stages of "
            "the costs can be joined.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit",
            metavar="X",
            help="What each rank may hold: 8 (microbatches x 1/P of the model), 0.5x (of what "
            "1F1B holds), or bytes such as 40GB. If not given, everything may be held.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="makespan|span",
            help="makespan, until the last rank ends; or span, the longest time from a rank's "
            "first action to its last, where ranks need not wait for each other.",
            rich_help_panel=_JOB,
        ),
    ] = "makespan",
    robust: Annotated[
        bool,
        typer.Option(
            "--robust",
            help="Find what nine steps of ten do not exceed when times vary, instead of what a "
            "step takes when nothing does.",
            rich_help_panel=_JOB,
        ),
    ] = False,
    jitter: Annotated[
        float,
        typer.Option(
            "--jitter",
            metavar="X",
            help="For --robust: by which share every action's time varies (standard deviation).",
            rich_help_panel=_JOB,
        ),
    ] = 0.1,
    hop_s: Annotated[
        float | None,
        typer.Option(
            "--hop-s",
            metavar="S",
            help="Latency of a message, instead of the file's.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit",
            metavar="S",
            help="Seconds to search at the most.",
            rich_help_panel=_EFFORT,
        ),
    ] = 10.0,
    iterations: Annotated[
        int | None,
        typer.Option(
            "--iterations",
            metavar="N",
            help="Moves to try at the most. Where this is what stops the search, a seed gives the "
            "same schedule everywhere.",
            rich_help_panel=_EFFORT,
        ),
    ] = None,
    prove: Annotated[
        float | None,
        typer.Option(
            "--prove",
            metavar="S",
            help="Then try for S seconds a placement to prove that nothing is faster; for small "
            "schedules (needs OR-tools: pip install 'fullbore[search]').",
            rich_help_panel=_EFFORT,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(metavar="N", help="Of the random numbers.", rich_help_panel=_EFFORT),
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.csv",
            help="Write the schedule, in PyTorch's format; run it with --schedule FILE.csv.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    output_costs: Annotated[
        Path | None,
        typer.Option(
            "--output-costs",
            metavar="FILE.json",
            help="Write the costs of the schedule's own stages, for show and simulate.",
            rich_help_panel=_RESULT,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    from fullbore.cost import Costs
    from fullbore.search import Jitter, Job, Limits, MemoryLimit
    from fullbore.search import search as find

    if output is not None and output.suffix.lower() != ".csv":
        raise ConfigError(f"-o {output}: a schedule is written as CSV; end the name in .csv")
    read = Costs.load(costs)
    job = Job(
        costs=_with_hop(read, hop_s),
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=_numbers(virtual_stages),
        memory_limit=None if memory_limit is None else MemoryLimit.parse(memory_limit),
        spans=_objective(objective) == "span",
    )
    with _interruptible() as interrupted, _progress() as report:
        limits = Limits(time_s=time_limit, moves=iterations, stop=lambda: bool(interrupted))
        varies = Jitter(deviation=jitter) if robust else None
        found = find(job, limits=limits, jitter=varies, prove_s=prove, seed=seed, report=report)
    _hand_over(job, found, output, output_costs, as_json=as_json)


search.__doc__ = EXAMPLES


def _with_hop(costs: Costs, hop_s: float | None) -> Costs:
    if hop_s is None:
        return costs
    return costs.parse({**costs.model_dump(exclude_none=True), "hop_s": hop_s}, where="--hop-s")


def _objective(name: str) -> Literal["makespan", "span"]:
    if name == "makespan" or name == "span":
        return "makespan" if name == "makespan" else "span"
    raise ConfigError(f"--objective {name}: choose makespan or span")


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--virtual-stages {text}: write numbers such as 1,2,4") from None


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C ends the search and keeps its best; a second one is as hard as ever."""
    caught: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _frame: object) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress() -> Iterator[_Line]:
    line = _Line(shown=sys.stderr.isatty())
    try:
        yield line
    finally:
        line.clear()


class _Line:
    """One line on a terminal's stderr that is written anew a few times a second."""

    def __init__(self, *, shown: bool) -> None:
        self._shown, self._next_s, self._width = shown, 0.0, 0

    def __call__(self, progress: Progress) -> None:
        """Show how far the search is, where somebody looks and not too often."""
        if not self._shown or progress.elapsed_s < self._next_s:
            return
        from fullbore.cli.figures import seconds

        self._next_s = progress.elapsed_s + 0.2
        gap = 1 - progress.bound_s / progress.best_s if progress.best_s > 0 else 0.0
        text = (
            f"{progress.elapsed_s:5.1f} s  best {seconds(progress.best_s)}, at most "
            f"{gap * 100:.2f} % above what is possible; Ctrl-C keeps it"
        )
        self._write(text)

    def clear(self) -> None:
        """Leave the line empty."""
        if self._width:
            self._write("")
            print("\r", end="", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
        self._width = len(text)


def _hand_over(
    job: Job, found: Found, output: Path | None, output_costs: Path | None, *, as_json: bool
) -> None:
    """Check what was found against the simulator and the laws, write it and tell of it."""
    from fullbore.cli.output import print_json, write
    from fullbore.cli.prediction import Prediction
    from fullbore.ir import to_text
    from fullbore.sim import simulate
    from fullbore.timeline import summarize
    from fullbore.verify import check

    check(found.schedule)
    timeline = simulate(found.schedule, found.costs)
    prediction = Prediction(
        schedule=found.schedule,
        costs=found.costs,
        overlap=True,
        timeline=timeline,
        summary=summarize(timeline, found.schedule),
    )
    if output is not None:
        write(output, to_text(found.schedule))
        print(f"wrote {output}", file=sys.stderr)
    if output_costs is not None:
        found.costs.save(output_costs)
        print(f"wrote {output_costs}", file=sys.stderr)
    if as_json:
        print_json(_document(job, found, prediction))
    else:
        _print(job, found, prediction)


def _document(job: Job, found: Found, prediction: Prediction) -> dict[str, object]:
    from fullbore.cli.prediction import describe

    named = found.named
    return {
        **describe(prediction),
        "objective": "span" if job.spans else "makespan",
        "memory_limit": None if job.memory_limit is None else str(job.memory_limit),
        "placement": found.placement,
        "placements": list(found.placements),
        "value_s": found.value_s,
        "lower_bound_s": found.bound_s,
        "gap": found.gap,
        "p90_s": found.quantile_s,
        "best_named": None if named is None else named.name,
        "best_named_s": None if named is None else named.value_s,
        "moves": found.moves,
        "elapsed_s": found.elapsed_s,
    }


def _print(job: Job, found: Found, prediction: Prediction) -> None:
    from fullbore.cli.figures import headline, percent, seconds, totals

    what = "span" if job.spans else "makespan"
    print(headline(prediction), "", *totals(prediction), "", sep="\n")
    print(f"placement         {found.placement}, of {'; '.join(found.placements)}")
    print(f"lower bound       {seconds(found.bound_s)}: no schedule of these has a shorter {what}")
    print(f"gap               {found.gap * 100:.2f} % of the {what}, {seconds(found.value_s)}")
    value_s = found.value_s
    if found.quantile_s is not None:
        value_s = found.quantile_s
        print(f"with jitter       nine steps of ten take {seconds(value_s)} at the most")
    if found.named is None:
        print("best named        none fits")
    else:
        less = percent(1 - value_s / found.named.value_s)
        print(f"best named        {found.named.name}, {seconds(found.named.value_s)}: {less} less")
    print(f"searched          {found.elapsed_s:.1f} s, {found.moves:,} moves")
