"""`fullbore search`: the best schedule for given costs and memory, and a bound on any other."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fullbore.cli.interrupt import interruptible
from fullbore.cli.options import JsonFlag
from fullbore.cli.training_options import option
from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.cli.prediction import Prediction
    from fullbore.cost import Costs
    from fullbore.search import Found, Jitter, Job, Means, Progress

__all__ = ["search"]

_JOB = "What is searched for"
_EFFORT = "How long"
_RESULT = "Result"


def search(
    *,
    costs: Annotated[
        Path,
        option(
            _JOB,
            "--costs",
            metavar="FILE",
            help="A JSON file with the costs of each stage (docs/costs.md).",
        ),
    ],
    ranks: Annotated[
        int,
        option(
            _JOB,
            "--pipeline-model-parallel-size",
            "-p",
            metavar="P",
            help="Pipeline ranks.",
        ),
    ],
    microbatches: Annotated[
        int,
        option(
            _JOB,
            "--num-microbatches",
            "-m",
            metavar="M",
            help="Microbatches a step.",
        ),
    ],
    virtual_stages: Annotated[
        str | None,
        option(
            _JOB,
            "--num-virtual-stages-per-pipeline-rank",
            "--virtual-stages",
            "-v",
            metavar="V,...",
            help="Stages a rank to try, such as 1,2,4. A stage of the costs is taken to split "
            "evenly where that is needed. If not given: every number into which the stages of "
            "the costs can be joined.",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        option(
            _JOB,
            "--memory-limit",
            metavar="X",
            help="What each rank may hold: 8 (microbatches x 1/P of the model), 0.5x (of what "
            "1F1B holds), or bytes such as 40GB; or P of these, such as 40GB,60GB, where ranks "
            "have not equally much room. If not given, everything may be held.",
        ),
    ] = None,
    allow: Annotated[
        str | None,
        option(
            _JOB,
            "--allow",
            metavar="offload,recompute",
            help="Besides order: activations may leave for the host (OFFLOAD; the costs say "
            "offload_s or offload_bytes_per_s), or be made again (R; recompute_input_bytes), where "
            "a rank would hold more than the limit.",
        ),
    ] = None,
    objective: Annotated[
        str,
        option(
            _JOB,
            "--objective",
            metavar="makespan|span",
            help="makespan, until the last rank ends; or span, the longest time from a rank's "
            "first action to its last, where ranks need not wait for each other.",
        ),
    ] = "makespan",
    robust: Annotated[
        bool,
        option(
            _JOB,
            "--robust",
            help="Find what nine steps of ten do not exceed when times vary, instead of what a "
            "step takes when nothing does.",
        ),
    ] = False,
    jitter: Annotated[
        float | None,
        option(
            _JOB,
            "--jitter",
            metavar="X",
            help="For --robust: by which share every action's time varies (standard deviation); "
            "0.1 if not given.",
        ),
    ] = None,
    hop_s: Annotated[
        float | None,
        option(
            _JOB,
            "--hop-s",
            metavar="S",
            help="Latency of a message, instead of the file's.",
        ),
    ] = None,
    time_limit: Annotated[
        float,
        option(
            _EFFORT,
            "--time-limit",
            metavar="S",
            help="Seconds to search at the most.",
        ),
    ] = 10.0,
    iterations: Annotated[
        int | None,
        option(
            _EFFORT,
            "--iterations",
            metavar="N",
            help="Moves to try at the most. Where this is what stops the search, a seed gives the "
            "same schedule everywhere.",
        ),
    ] = None,
    prove: Annotated[
        float | None,
        option(
            _EFFORT,
            "--prove",
            metavar="S",
            help="Then try for S seconds a placement to prove that nothing is faster; for small "
            "schedules (needs OR-tools: pip install 'fullbore[search]').",
        ),
    ] = None,
    seed: Annotated[
        int,
        option(_EFFORT, "--seed", metavar="N", help="Of the random numbers."),
    ] = 0,
    output: Annotated[
        Path | None,
        option(
            _RESULT,
            "--output",
            "-o",
            metavar="FILE.csv",
            help="Write the schedule, in PyTorch's format; run it with --schedule FILE.csv.",
        ),
    ] = None,
    output_costs: Annotated[
        Path | None,
        option(
            _RESULT,
            "--output-costs",
            metavar="FILE.json",
            help="Write the costs of the schedule's own stages, for show and simulate.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the order of forwards and backwards that ends soonest.

    Give the costs of the finest cut you can run: with stages for 2 P or 4 P, placements with two or
    four stages a rank are tried, too (looped, V and wave), and 1F1B's with neighbours joined.
    Split the backward in the costs (input_grad_s, weight_grad_s) wherever it can be split.

    The search starts from every named schedule that fits and stops when the time is up, the
    schedule is as good as the lower bound, or you press Ctrl-C; the best so far is kept. The lower
    bound is a proof: no schedule of the placements tried can be faster (docs/search.md).

      fullbore search --costs costs.json -p 8 -m 32 --memory-limit 1x -o best.csv
    """
    from fullbore.cli.output import check_place
    from fullbore.cost import Costs
    from fullbore.search import Job, Limits, MemoryLimit
    from fullbore.search import search as find

    if output is not None and output.suffix.lower() != ".csv":
        raise ConfigError(f"-o {output}: a schedule is written as CSV; end the name in .csv")
    check_place(output, output_costs)
    read = Costs.load(costs)
    job = Job(
        costs=_with_hop(read, hop_s),
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=_numbers(virtual_stages),
        memory_limit=None if memory_limit is None else MemoryLimit.parse(memory_limit),
        spans=_is_span(objective),
        means=_means(allow),
    )
    varies = _jitter(jitter, robust=robust)
    _say_what_is_whole(read)
    with interruptible() as interrupted, _progress() as report:
        limits = Limits(time_s=time_limit, moves=iterations, stop=lambda: bool(interrupted))
        found = find(job, limits=limits, jitter=varies, prove_s=prove, seed=seed, report=report)
    _hand_over(job, found, output, output_costs, as_json=as_json)


def _with_hop(costs: Costs, hop_s: float | None) -> Costs:
    if hop_s is None:
        return costs
    return costs.parse({**costs.model_dump(exclude_none=True), "hop_s": hop_s}, where="--hop-s")


def _is_span(objective: str) -> bool:
    if objective not in ("makespan", "span"):
        raise ConfigError(f"--objective {objective}: choose makespan or span")
    return objective == "span"


def _jitter(deviation: float | None, *, robust: bool) -> Jitter | None:
    from fullbore.search import Jitter

    if not robust:
        if deviation is not None:
            raise ConfigError("--jitter says what --robust is for: add --robust, or leave it out")
        return None
    return Jitter() if deviation is None else Jitter(deviation=deviation)


def _say_what_is_whole(costs: Costs) -> None:
    """Where only some stages have halves of a backward, none is split: nobody would notice."""
    whole = [stage for stage, one in enumerate(costs.stages) if not one.is_split]
    if 0 < len(whole) < len(costs.stages):
        print(
            f"no backward is split, since stage {whole[0]} names no input_grad_s and weight_grad_s",
            file=sys.stderr,
        )


def _means(text: str | None) -> tuple[Means, ...]:
    from fullbore.search import MEANS

    asked = [] if text is None else [name.strip() for name in text.split(",")]
    for name in asked:
        if name not in MEANS:
            raise ConfigError(f"--allow {text}: choose {' or '.join(MEANS)}, or {','.join(MEANS)}")
    return tuple(means for means in MEANS if means in asked)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--virtual-stages {text}: write numbers such as 1,2,4") from None


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """One line on a terminal's stderr, and nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console

    with Console(stderr=True).status("compiling, once on a machine") as status:
        yield lambda progress: status.update(_line(progress))


def _line(progress: Progress) -> str:
    from fullbore.cli.figures import seconds

    if math.isinf(progress.best_s):
        return f"{progress.elapsed_s:5.1f} s  nothing within the memory limit yet"
    gap = 1 - progress.bound_s / progress.best_s if progress.best_s > 0 else 0.0
    return (
        f"{progress.elapsed_s:5.1f} s  best {seconds(progress.best_s)}, at most "
        f"{gap * 100:.2f} % above what is possible; Ctrl-C keeps it"
    )


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
    try:
        if output is not None:
            write(output, to_text(found.schedule))
            print(f"wrote {output}", file=sys.stderr)
        if output_costs is not None:
            found.costs.save(output_costs)
            print(f"wrote {output_costs}", file=sys.stderr)
    finally:  # what was found is told also where it cannot be written
        if as_json:
            print_json(_document(job, found, prediction))
        else:
            _print(job, found, prediction)
    if output is None and not as_json:
        print("schedule          not kept: give -o FILE.csv, and --output-costs FILE.json")


def _document(job: Job, found: Found, prediction: Prediction) -> dict[str, object]:
    from fullbore.cli.prediction import describe

    named = found.named
    return {
        **describe(prediction),
        "objective": "span" if job.spans else "makespan",
        "memory_limit": None if job.memory_limit is None else str(job.memory_limit),
        "allowed": list(job.means),
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


def _limit(job: Job) -> list[str]:
    """What a rank may hold, in the unit of the peaks above."""
    from fullbore.view.units import amount

    limit = job.memory_limit
    if limit is None:
        return []
    amounts = limit.resolve(job.costs, ranks=job.ranks, microbatches=job.microbatches).tolist()
    in_bytes = limit.counts_bytes(job.costs)
    each = [amount(one, "bytes") if in_bytes else f"{one:.4g} microbatches" for one in amounts]
    told = f"{each[0]} a rank" if len(set(each)) == 1 else f"{', '.join(each)} by rank"
    return [
        f"memory limit      {told}, {limit}"
        if limit.unit == "1f1b"
        else f"memory limit      {told}"
    ]


def _print(job: Job, found: Found, prediction: Prediction) -> None:
    from fullbore.cli.figures import headline, percent, seconds, totals

    what = "span" if job.spans else "makespan"
    print(headline(prediction), "", *totals(prediction), *_limit(job), "", sep="\n")
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
        less = percent(1 - value_s / found.named.value_s if found.named.value_s > 0 else 0.0)
        print(f"best named        {found.named.name}, {seconds(found.named.value_s)}: {less} less")
    print(f"searched          {found.elapsed_s:.1f} s, {found.moves:,} moves")
