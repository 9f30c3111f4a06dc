"""`fullbore check FILE.csv`: whether a schedule obeys every law."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullbore.cli.options import JsonFlag

if TYPE_CHECKING:
    from fullbore.ir import Schedule
    from fullbore.verify import Violation

__all__ = ["check"]


def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="A schedule in PyTorch's CSV format.")
    ],
    *,
    peak_limit: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Most activations a rank may hold, in microbatches × 1/P of the model.",
        ),
    ] = None,
    blocking_sends: Annotated[
        bool,
        typer.Option(
            "--blocking-sends",
            help="Also prove that it cannot deadlock where a send waits for its receive.",
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check a schedule file.

    Exit status 0 if it obeys every law, 1 with the violations if not, 2 if it is no schedule.
    """
    from fullbore.cli.output import print_json
    from fullbore.ir import Schedule
    from fullbore.verify import verify

    schedule = Schedule.from_csv(file)
    violations = verify(schedule, peak_limit=peak_limit, blocking_sends=blocking_sends)
    if as_json:
        print_json(_document(file, schedule, violations))
    else:
        _print(file, schedule, violations)
    if violations:
        raise typer.Exit(1)


def _document(file: Path, schedule: Schedule, violations: list[Violation]) -> dict[str, object]:
    return {
        "file": str(file),
        "ok": not violations,
        "ranks": schedule.ranks,
        "virtual_stages": schedule.virtual_stages,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches // schedule.slices,
        "slices": schedule.slices,
        "actions": schedule.actions,
        "has_communication": schedule.has_communication,
        "violations": [
            {
                "rank": violation.rank,
                "index": violation.index,
                "action": str(violation.action),
                "rule": violation.rule,
                "detail": violation.detail,
                "remedy": violation.remedy,
            }
            for violation in violations
        ],
    }


def _print(file: Path, schedule: Schedule, violations: list[Violation]) -> None:
    from fullbore.cli.figures import counted

    for violation in violations:
        print(violation)
    size = ", ".join(
        counted(number, noun)
        for number, noun in (
            (schedule.ranks, "rank"),
            (schedule.stages, "stage"),
            (schedule.microbatches // schedule.slices, "microbatch"),
            *(((schedule.slices, "slice"),) if schedule.slices > 1 else ()),
            (schedule.actions, "action"),
        )
    )
    found = counted(len(violations), "violation") if violations else "obeys every law"
    print(f"{file}: {found} ({size})")
