"""The dependency graph of a schedule: the one definition of what must come before what.

    F(s, m)  needs F(s-1, m)            B(s, m), I(s, m)  need F(s, m) and B or I (s+1, m)
    W(s, m)  needs I(s, m)            R(s, m)  needs F(s, m); B and I need R where there is one
    OFFLOAD(s, m)  needs F(s, m)      RELOAD(s, m)  needs OFFLOAD(s, m); B and I need it, as R

Where sequences are cut into slices, a slice's F needs that of the slice before it, whose keys and
values it attends to, and a slice's B (or I) needs that of the slice behind it, for their gradients.

Between ranks the value travels as a message; where sends and receives are written out it goes
compute -> SEND -> RECV -> compute, otherwise the edge joins the two compute actions directly.
Simulator, laws, critical path and runtime all read these arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir.action import Kind
from fullbore.ir.schedule import FlatSchedule, Schedule

__all__ = ["Dependencies", "dependencies"]

Indices = npt.NDArray[np.int64]
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """For each action [N] of the flat schedule, the flat indices of what it waits for, or -1.

    value: what hands it its tensor: the upstream forward, the downstream backward, the SEND that
        a RECV takes, the compute whose result a SEND sends. It may stand on another rank.
    stored: what it needs from its own stage: a backward its forward, or that one's
        recomputation, which needs the forward, or the RELOAD of what it saved, which needs the
        OFFLOAD; a W its I. Same rank.
    carried: what it needs from another slice of its sequence, on its own stage. Same rank.
    Where an action occurs twice, or not at all, `value` and `stored` are those of the last one,
    or -1: `verify` reports both.
    """

    value: Indices
    stored: Indices
    carried: Indices


def dependencies(schedule: Schedule) -> Dependencies:
    """The dependency graph of a schedule, without the order of each program. Linear in actions."""
    flat = schedule.flat()
    table = _Table(flat, schedule.stages, schedule.microbatches)
    value, stored, carried = (np.full(len(flat.kind), _NONE, dtype=np.int64) for _ in range(3))

    def fill(into: Indices, kind: Kind, *sources: tuple[Kind, int]) -> None:
        at = np.flatnonzero(flat.kind == kind)
        into[at] = table.first(at, sources)

    upstream, downstream, here = -1, +1, 0
    fill(value, Kind.F, (Kind.RECV_F, here), (Kind.F, upstream))
    for backward in (Kind.B, Kind.I):
        fill(value, backward, (Kind.RECV_B, here), (Kind.B, downstream), (Kind.I, downstream))
        fill(stored, backward, (Kind.RELOAD, here), (Kind.R, here), (Kind.F, here))
    fill(value, Kind.RECV_F, (Kind.SEND_F, upstream))
    fill(value, Kind.RECV_B, (Kind.SEND_B, downstream))
    fill(value, Kind.SEND_F, (Kind.F, here))
    fill(value, Kind.SEND_B, (Kind.B, here), (Kind.I, here))
    fill(stored, Kind.W, (Kind.I, here))
    fill(stored, Kind.R, (Kind.F, here))
    fill(stored, Kind.OFFLOAD, (Kind.F, here))
    fill(stored, Kind.RELOAD, (Kind.OFFLOAD, here))
    if schedule.slices > 1:
        _carry(carried, flat, table, schedule.slices)
    return Dependencies(value=value, stored=stored, carried=carried)


def _carry(carried: Indices, flat: FlatSchedule, table: _Table, slices: int) -> None:
    """What each F, B and I needs from the neighbouring slice of its sequence."""
    number = flat.microbatch % slices
    for kinds, edge, step in (((Kind.F,), 0, -1), ((Kind.B, Kind.I), slices - 1, +1)):
        at = np.flatnonzero(np.isin(flat.kind, kinds) & (number != edge))
        carried[at] = table.first(at, tuple((kind, 0) for kind in kinds), microbatch_step=step)


class _Table:
    """Finds the flat index of any (kind, stage, microbatch)."""

    def __init__(self, flat: FlatSchedule, stages: int, microbatches: int) -> None:
        self._flat, self._stages, self._microbatches = flat, stages, microbatches
        self._tables: dict[Kind, Indices] = {}

    def first(
        self, at: Indices, sources: tuple[tuple[Kind, int], ...], *, microbatch_step: int = 0
    ) -> Indices:
        """For actions [n] at these flat indices: of several candidates, the first that exists.

        A candidate is (kind, step): the action of this kind, `step` stages on, and of the same
        microbatch, or `microbatch_step` on.
        """
        result = np.full(len(at), _NONE, dtype=np.int64)
        for kind, stage_step in sources:
            unset = np.flatnonzero(result == _NONE)
            result[unset] = self._find(at[unset], kind, stage_step, microbatch_step)
        return result

    def _find(self, at: Indices, kind: Kind, stage_step: int, microbatch_step: int) -> Indices:
        stage = self._flat.stage[at] + np.int32(stage_step)
        microbatch = self._flat.microbatch[at] + np.int32(microbatch_step)
        inside = (stage >= 0) & (stage < self._stages) & (microbatch < self._microbatches)
        cells = np.where(inside, stage * np.int64(self._microbatches) + microbatch, _NONE)
        return self._table(kind)[cells]

    def _table(self, kind: Kind) -> Indices:
        """Flat indices [S * M + 1] of this kind by cell; the last one, for no cell, is -1."""
        if kind not in self._tables:
            flat = self._flat
            table = np.full(self._stages * self._microbatches + 1, _NONE, dtype=np.int64)
            at = np.flatnonzero(flat.kind == kind)
            stage, microbatch = flat.stage[at], flat.microbatch[at]
            inside = (stage < self._stages) & (microbatch < self._microbatches)
            cells = stage[inside] * np.int64(self._microbatches) + microbatch[inside]
            table[cells] = at[inside]
            self._tables[kind] = table
        return self._tables[kind]
