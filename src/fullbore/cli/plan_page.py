"""A plan as one self-contained page: memory against time, and every table."""

from __future__ import annotations

from fullbore.cli.plan_tables import (
    Cells,
    best_cells,
    conventions,
    headline,
    idle_cells,
    memory_cells,
    neighbour_cells,
    parts_cells,
    points,
    taken_text,
    totals,
)
from fullbore.plan.findings import Findings
from fullbore.view.html import Remarks, Table, render
from fullbore.view.scatter import scatter_svg

__all__ = ["page"]


def page(findings: Findings) -> str:
    """The page as text."""
    picture = scatter_svg(
        points(findings),
        x="GiB on the fullest rank",
        y="seconds a step",
        title="memory against time of the plans that none beats in both, and of the best",
    )
    tables = (
        _table("The best plans", best_cells(findings)),
        _table("Memory of each rank of the best plan, GiB", memory_cells(findings)),
        _table("Busy and idle time of each rank", idle_cells(findings)),
        _table("Where the step goes", parts_cells(findings)),
        _table("Why not otherwise: one change each", neighbour_cells(findings), words=True),
    )
    return render(
        title="Plan",
        panels=(),
        figure=picture,
        tables=tables,
        notes=(headline(findings.plan.question), *_taken(findings), *_notes(findings)),
        remarks=(
            Remarks(
                title="How the figures are meant",
                entries=tuple(("", line) for line in conventions(findings)),
            ),
        ),
    )


def _taken(findings: Findings) -> list[str]:
    question = findings.plan.question
    return [f"arguments {taken_text(question)}"] if question.borrowed.taken else []


def _notes(findings: Findings) -> list[str]:
    """The winner's lines, each of them whole."""
    return [f"{title}: {text}" for title, text in totals(findings)]


def _table(caption: str, cells: Cells, *, words: bool = False) -> Table:
    header, rows = cells
    return Table(caption=caption, headers=header, rows=tuple(rows), words=words)
