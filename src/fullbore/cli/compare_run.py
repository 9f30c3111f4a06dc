"""Running a comparison: the ranks are started, and whatever they measured becomes a report."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fullbore.cli.output import print_json, table, to_json, write
from fullbore.cli.place import place_here
from fullbore.errors import ConfigError, CostsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fullbore.compare import Outcome, Setting
    from fullbore.train.comparison import Job

__all__ = ["run"]

_INTERRUPTED = 130


def run(job: Job, output: Path, *, as_json: bool) -> None:
    """Run a job, write its report into a folder and print it.

    What was measured before an interruption or a failure is reported too; then the exit status
    is 130, or the error is raised.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make --output {output}: {error.strerror or error}") from error
    with tempfile.TemporaryDirectory(prefix="fullbore-compare-") as folder:
        try:
            _launch(job, Path(folder))
        finally:
            reported = _report(job, Path(folder), output, as_json=as_json)
    if reported.problems:
        raise CostsError(
            "measured, and in the report, but not to be predicted: " + "; ".join(reported.problems)
        )
    if not reported.whole:
        raise typer.Exit(_INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reported:
    """whole: whether all that was asked for was measured. problems: why some was not predicted."""

    whole: bool
    problems: tuple[str, ...]


def _launch(job: Job, handover: Path) -> None:
    from fullbore.train.launch import launch_ranks

    try:
        launch_ranks(_be_rank, job, handover, ranks=job.schedules[0].ranks, imports=job.imports)
    except KeyboardInterrupt:
        return  # the measurements say how far it came


def _be_rank(job: Job, handover: Path) -> None:
    """What each process runs."""
    from rich.console import Console

    from fullbore.train.bar import Bar, Nobody
    from fullbore.train.comparison import Handover, compare_on_rank
    from fullbore.train.launch import StopRequest

    place = place_here()
    watcher: Bar | Nobody = Nobody()
    if place.rank == 0:
        watcher = Bar(Console(stderr=True), schedules=len(job.schedules), steps=job.length.steps)
    with StopRequest() as should_stop:
        try:
            compare_on_rank(
                job, Handover(handover), place, watcher=watcher, should_stop=should_stop
            )
        finally:
            watcher.close()


def _report(job: Job, handover: Path, output: Path, *, as_json: bool) -> _Reported:
    """Write and print what was measured."""
    from fullbore.compare import assess
    from fullbore.train.comparison import Handover

    setting, measurements = Handover(handover).take()
    whole = len(measurements) == len(job.schedules) and all(m.complete for m in measurements)
    if setting is None:
        typer.echo("fullbore: ended before a step was measured; nothing was written", err=True)
        return _Reported(whole=whole, problems=())
    outcomes = [assess(measurement, setting) for measurement in measurements]
    try:
        _write(setting, outcomes, output)
    finally:  # what was measured is told also where it cannot be written
        _tell(setting, outcomes, output, as_json=as_json)
    if not whole:
        ran = ", ".join(measurement.label for measurement in measurements)
        typer.echo(f"fullbore: ended early; the report holds {ran}", err=True)
    told = tuple(f"{o.measurement.label}: {o.problem}" for o in outcomes if o.problem is not None)
    return _Reported(whole=whole, problems=told)


def _write(setting: Setting, outcomes: Sequence[Outcome], output: Path) -> None:
    from fullbore.compare.document import costs_file, document
    from fullbore.compare.page import page

    write(output / "report.json", to_json(document(setting, outcomes)))
    for outcome in outcomes:
        if outcome.costs is not None:
            outcome.costs.save(output / costs_file(outcome))
    write(output / "report.html", page(setting, outcomes))


def _tell(setting: Setting, outcomes: Sequence[Outcome], output: Path, *, as_json: bool) -> None:
    from fullbore.compare.document import document

    if as_json:
        print_json(document(setting, outcomes))
    else:
        _print(setting, outcomes, output)


def _print(setting: Setting, outcomes: Sequence[Outcome], output: Path) -> None:
    from fullbore.compare.tables import columns, headline, rows

    print(headline(setting), *(f"Warning: {text}" for text in setting.warnings), sep="\n")
    chosen = columns(setting)
    cells = [
        [row.schedule, *(str(getattr(row, name)) for name in chosen)] for row in rows(outcomes)
    ]
    print("", table(["schedule", *chosen.values()], cells), "", sep="\n")
    print(
        "measured / predicted; bubble fraction = idle / (ranks × makespan); change: measured step",
        "time against the first row; peak activations of the rank that holds most, and of each:",
        "",
        sep="\n",
    )
    print(_peaks(setting, outcomes))
    print(f"\nreport: {output / 'report.html'}")


def _peaks(setting: Setting, outcomes: Sequence[Outcome]) -> str:
    from fullbore.compare.tables import peaks_by_rank

    header = ["schedule", *(f"rank {rank}" for rank in range(setting.ranks))]
    cells = [
        [outcome.measurement.label, *map(str, peaks)]
        for outcome, peaks in zip(outcomes, peaks_by_rank(outcomes), strict=True)
    ]
    return table(header, cells)
