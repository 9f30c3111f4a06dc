"""Planning on a terminal: a line of progress, Ctrl-C that keeps the best, and where it all goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fullbore.cli.figures import counted, seconds
from fullbore.cli.interrupt import interruptible
from fullbore.cli.output import print_json, write
from fullbore.cli.plan_document import document
from fullbore.cli.plan_page import page
from fullbore.cli.plan_tables import report
from fullbore.plan import Plan, Progress, Question, plan
from fullbore.plan.findings import findings_of

__all__ = ["hand_over", "run"]


def run(question: Question, *, top: int) -> Plan:
    """Plan, with progress on a terminal's stderr."""
    with interruptible() as interrupted, _progress() as tell:
        return plan(question, top=top, report=tell, stop=lambda: bool(interrupted))


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal's stderr, and nothing where nobody looks."""
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
            task, total=progress.spreads, completed=progress.done, description=_line(progress)
        )


def _line(progress: Progress) -> str:
    best = "none fits yet" if progress.best_s is None else f"best {seconds(progress.best_s)}"
    made = counted(progress.simulated, "simulation")
    return f"{progress.done} of {progress.spreads} spreads, {made}, {best}; Ctrl-C keeps it"


def hand_over(made: Plan, *, output: Path | None, as_json: bool) -> None:
    """Print the plan, as text or JSON, and write the page."""
    findings = findings_of(made)
    if output is not None:
        write(output, page(findings))
        print(f"wrote {output}", file=sys.stderr)
    if as_json:
        print_json(document(findings))
    else:
        print(report(findings))
    if not made.complete:
        print("fullbore: interrupted; this is the best so far", file=sys.stderr)
