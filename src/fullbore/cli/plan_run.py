"""Planning on a terminal: a line of progress, Ctrl-C that keeps the best, and where it all goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from fullbore.cli.figures import counted, seconds
from fullbore.cli.interrupt import interruptible
from fullbore.cli.output import print_json, write
from fullbore.cli.plan_document import document
from fullbore.cli.plan_emit import Emission
from fullbore.cli.plan_inputs import blamed
from fullbore.cli.plan_page import page
from fullbore.cli.plan_tables import report
from fullbore.errors import ConfigError
from fullbore.ir import to_text
from fullbore.plan import Effort, Plan, Progress, Question, plan
from fullbore.plan.findings import Findings, findings_of

__all__ = ["hand_over", "progress", "run"]

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where to write the page, the schedule and the costs of the best plan; None for nowhere.

    launch: for whom launch files are written, and where. Raises ConfigError for a name that says
    something else, or a folder that is not there, before anything is planned.
    """

    page: Path | None
    schedule: Path | None
    costs: Path | None
    launch: Emission

    def __post_init__(self) -> None:
        for flag, path, suffix in (
            ("-o", self.page, ".html"),
            ("--output-schedule", self.schedule, ".csv"),
            ("--output-costs", self.costs, ".json"),
        ):
            if path is None:
                continue
            if path.suffix.lower() != suffix:
                raise ConfigError(f"{flag} {path}: end the name in {suffix}")
            if not os.path.isdir(path.absolute().parent):
                raise ConfigError(f"{flag} {path}: there is no folder {path.absolute().parent}")


def run(question: Question, *, top: int, effort: Effort) -> Plan:
    """Plan, with progress on a terminal's stderr; leaves with 130 if stopped too early."""
    with interruptible() as interrupted, progress() as tell:
        try:
            return plan(
                question, top=top, effort=effort, report=tell, stop=lambda: bool(interrupted)
            )
        except ConfigError as error:
            if not interrupted:
                raise blamed(error, question.borrowed, question.shape.name) from error
            reason = error
    print(f"fullbore: {reason}", file=sys.stderr)
    raise typer.Exit(_INTERRUPTED)


@contextmanager
def progress(*, keeps: bool = True) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal's stderr, and nothing where nobody looks.

    keeps: whether it says that Ctrl-C keeps the best.
    """
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(bar_width=30), TextColumn("{task.description}"))
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("pricing the model", total=None)
        yield lambda progress: bar.update(
            task,
            total=progress.spreads,
            completed=progress.done,
            description=_line(progress, keeps=keeps),
        )


def _line(progress: Progress, *, keeps: bool) -> str:
    best = "none fits yet" if progress.best_s is None else f"best {seconds(progress.best_s)}"
    made = counted(progress.simulated, "simulation")
    told = f"{progress.done} of {progress.spreads} spreads, {made}, {best}"
    return f"{told}; Ctrl-C keeps it" if keeps else told


def hand_over(made: Plan, files: Files, *, as_json: bool) -> None:
    """Print the plan, as text or JSON, and write the files; where one fails, the other is done."""
    findings = findings_of(made)
    try:
        if as_json:
            print_json(document(findings))
        else:
            print(report(findings))
    finally:
        _write(findings, files)
    if not made.complete:
        print("fullbore: interrupted; this is the best so far", file=sys.stderr)


def _write(findings: Findings, files: Files) -> None:
    evaluator, choice = findings.plan.evaluator, findings.winner.choice
    if files.page is not None:
        write(files.page, page(findings))
    if files.schedule is not None:
        write(files.schedule, to_text(evaluator.programs.of(choice).schedule))
    if files.costs is not None:
        evaluator.costs(choice).save(files.costs)
    launch = files.launch.write(findings)
    for path in (files.page, files.schedule, files.costs, *launch):
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)
