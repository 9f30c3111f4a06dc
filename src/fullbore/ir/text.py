"""Schedules as text: PyTorch's CSV, a row a rank, one action a cell, both ways.

Empty cells are PyTorch's idle slots and carry no meaning here. Cells that only steer PyTorch's
FSDP (`0UNSHARD`, `0RESHARD`, `0REDUCE_GRAD`) are accepted and dropped, since Fullbore decides
those itself; a pair `(0F1;3B0)OVERLAP_F_B` is read as its members, in order.

Where sequences are cut into k slices the first cell of every row says so, as `4SLICES`. PyTorch,
which knows no slices, then refuses the file instead of taking each slice for a whole sequence.
"""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fullbore.errors import NotationError
from fullbore.ir.action import COMPUTE_KINDS, Action
from fullbore.ir.placement import MOST_ACTIONS, MOST_RANKS, Placement
from fullbore.ir.schedule import Program, Schedule

__all__ = ["from_text", "read_text", "to_text"]

_LINE_END = re.compile(r"\r\n|\n|\r")  # str.splitlines would also end lines at form feeds
_SHARDING = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)")
_SLICES = re.compile(r"([1-9][0-9]{0,8})SLICES")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def to_text(schedule: Schedule) -> str:
    """The schedule as PyTorch's CSV: what its `_load_csv` reads, unless there are slices."""
    slices = f"{schedule.slices}SLICES," if schedule.slices > 1 else ""
    return "".join(slices + ",".join(map(str, program)) + "\r\n" for program in schedule.programs)


def read_text(path: str | PathLike[str]) -> str:
    """The text of a schedule file; NotationError where it cannot be read as text."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise NotationError(f"cannot read {path}: {error}") from error
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        line, column = before.count("\n") + 1, before.rpartition("\n")[2].count(",") + 1
        raise NotationError(
            f"cannot read {path}: line {line}, column {column} is not text: {error}"
        ) from error


def from_text(text: str, *, name: str = "csv") -> Schedule:
    """Read PyTorch's CSV; placement and M are what the cells say.

    Raises NotationError naming line and column (both 1-based, the column counted in cells).
    """
    rows = _LINE_END.split(text.lstrip("\ufeff"))
    while rows and not rows[-1].strip(" ,"):
        rows.pop()
    if not rows:
        raise NotationError("the schedule is empty: write one row of actions a rank")
    if len(rows) > MOST_RANKS:
        raise NotationError(
            f"line {MOST_RANKS + 1}, column 1: a row a rank, and no more than {MOST_RANKS} ranks "
            "are supported"
        )
    programs = tuple(Program.of(_row(line, number)) for number, line in enumerate(rows, start=1))
    return _assemble(programs, rows, name)


def _row(line: str, number: int) -> list[Action]:
    actions: list[Action] = []
    for column, cell in enumerate(line.split(","), start=1):
        try:
            actions.extend(_cell(cell.strip()))
        except NotationError as error:
            raise NotationError(f"line {number}, column {column}: {error}") from None
    if not actions:
        raise NotationError(f"line {number}, column 1: rank {number - 1} has no action")
    return actions


def _cell(cell: str) -> list[Action]:
    if cell.startswith('"') and cell.endswith('"') and len(cell) > 1:
        cell = cell[1:-1].strip()
    if not cell or _SHARDING.fullmatch(cell) or _SLICES.fullmatch(cell):
        return []
    pair = _OVERLAP.fullmatch(cell)
    return [Action.parse(part) for part in (pair.group(1).split(";") if pair else [cell])]


def _assemble(programs: tuple[Program, ...], rows: list[str], name: str) -> Schedule:
    """Infer placement and M, refusing gaps before anything is allocated for them."""
    counts = {}
    for what in ("stage", "microbatch"):
        present = np.unique(np.concatenate([getattr(program, what) for program in programs]))
        last = int(present[-1])
        if len(present) != last + 1:
            gap = int(np.flatnonzero(present != np.arange(len(present)))[0])
            raise NotationError(
                f"{_locate(rows, what, last)}: {what} {last} is here, but {what} {gap} is nowhere"
            )
        counts[what] = last + 1
    if 2 * counts["stage"] * counts["microbatch"] > MOST_ACTIONS:
        raise NotationError(
            f"{_locate(rows, 'microbatch', counts['microbatch'] - 1)}: {counts['stage']} stages "
            f"and {counts['microbatch']} microbatches make more than the {MOST_ACTIONS:,} actions "
            "that are supported"
        )
    return Schedule(
        name=name,
        microbatches=counts["microbatch"],
        placement=_infer_placement(programs, counts["stage"]),
        programs=programs,
        slices=_slices(rows, counts["microbatch"]),
    )


def _slices(rows: list[str], microbatches: int) -> int:
    """How many slices a sequence has: what all cells that say it agree on, 1 where none does."""
    found = 0
    for line, row in enumerate(rows, start=1):
        for column, cell in enumerate(row.split(","), start=1):
            match = _SLICES.fullmatch(cell.strip())
            if match is None:
                continue
            here, told = f"line {line}, column {column}", int(match[1])
            if found not in (0, told):
                raise NotationError(f"{here}: {told} slices, but {found} before: write one number")
            if microbatches % told:
                raise NotationError(
                    f"{here}: the {microbatches} slices that are here make no sequences of {told}"
                )
            found = told
    return max(1, found)


def _locate(rows: list[str], what: str, value: int) -> str:
    """Line and column of the first action of this stage, or microbatch."""
    return next(
        f"line {number}, column {column}"
        for number, line in enumerate(rows, start=1)
        for column, cell in enumerate(line.split(","), start=1)
        for action in _cell(cell.strip())
        if getattr(action, what) == value
    )


def _infer_placement(programs: tuple[Program, ...], stages: int) -> Placement:
    """Each stage belongs to the rank with most of its compute actions (the laws judge the rest).

    Where every stage is computed on one rank for even microbatches, and on another one for odd
    microbatches, the model is there twice.
    """
    counts = _actions_by(programs, stages)  # [2, S, P]
    if _is_there_twice(counts):
        even, odd = (tuple(np.argmax(count, axis=1).tolist()) for count in counts)
        return Placement(stage_to_rank=even, copies=(odd,))
    owners = np.argmax(counts.sum(axis=0), axis=1)
    idle = sorted(set(range(len(programs))) - set(owners.tolist()))
    if idle:
        raise NotationError(
            f"line {idle[0] + 1}, column 1: rank {idle[0]} computes no stage of its own"
        )
    return Placement(stage_to_rank=tuple(owners.tolist()))


def _actions_by(programs: tuple[Program, ...], stages: int) -> npt.NDArray[np.int64]:
    """Compute actions for even and odd microbatches by stage and rank [2, S, P]."""
    counts = np.zeros((2, stages, len(programs)), dtype=np.int64)
    for rank, program in enumerate(programs):
        computes = np.isin(program.kind, COMPUTE_KINDS)
        np.add.at(counts[..., rank], (program.microbatch[computes] % 2, program.stage[computes]), 1)
    return counts


def _is_there_twice(counts: npt.NDArray[np.int64]) -> bool:
    even, odd = counts > 0
    return bool((even.sum(axis=1) == 1).all() and (odd.sum(axis=1) == 1).all()) and not bool(
        (even & odd).any()
    )
