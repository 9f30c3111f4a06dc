"""A schedule on trial: what every law looks at, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import Action, Dependencies, FlatSchedule, Kind, Schedule, dependencies
from fullbore.verify.violation import Finding

__all__ = ["Case", "Indices", "case_of"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schedule with its arrays; `homes` [C, S] is the placement as an array, a row a copy of
    the model.

    peak_limits: for each rank [P], in microbatches x 1/P of the model, or None.
    """

    schedule: Schedule
    flat: FlatSchedule
    needs: Dependencies
    homes: npt.NDArray[np.int32]
    communicates: bool
    peak_limits: tuple[float, ...] | None
    blocking_sends: bool

    def index(self, flat_index: int) -> int:
        """Where an action stands in its rank's program."""
        return int(flat_index - self.flat.offsets[self.flat.rank[flat_index]])

    def at(self, flat_index: int, *, detail: str, remedy: str) -> Finding:
        """A finding at an action that exists."""
        return Finding(
            rank=int(self.flat.rank[flat_index]),
            index=self.index(flat_index),
            action=self.flat.action(flat_index),
            detail=detail,
            remedy=remedy,
        )

    def missing(self, kind: Kind, stage: int, microbatch: int, *, why: str) -> Finding:
        """A finding about an action that is not there, on the rank of its stage."""
        rank = int(self.homes[microbatch % len(self.homes), stage])
        return Finding(
            rank=rank,
            index=None,
            action=Action(stage=stage, kind=kind, microbatch=microbatch),
            detail=f"is missing: {why}",
            remedy=f"add it to rank {rank}",
        )

    def counts(self, kind: Kind) -> Indices:
        """How often a kind occurs for each stage and microbatch [S, M]."""
        schedule, chosen = self.schedule, self.flat.kind == kind
        cell = self.flat.stage[chosen].astype(np.int64) * schedule.microbatches
        cell += self.flat.microbatch[chosen]
        cells = schedule.stages * schedule.microbatches
        return np.bincount(cell, minlength=cells).reshape(schedule.stages, schedule.microbatches)

    def repeated(self, kind: Kind) -> Indices:
        """Flat indices of every occurrence of this kind but the first, for each cell."""
        schedule, chosen = self.schedule, np.flatnonzero(self.flat.kind == kind)
        cell = self.flat.stage[chosen].astype(np.int64) * schedule.microbatches
        cell += self.flat.microbatch[chosen]
        order = np.argsort(cell, kind="stable")
        again = np.diff(cell[order], prepend=-1) == 0
        return np.sort(chosen[order[again]])


def case_of(
    schedule: Schedule, *, peak_limits: tuple[float, ...] | None, blocking_sends: bool
) -> Case:
    """Prepare a schedule for the laws."""
    return Case(
        schedule=schedule,
        flat=schedule.flat(),
        needs=dependencies(schedule),
        homes=schedule.placement.tables,
        communicates=schedule.has_communication,
        peak_limits=peak_limits,
        blocking_sends=blocking_sends,
    )
