"""The dependency graph of a schedule: the one definition of what must come before what.

    F(s, m)  needs F(s-1, m)            B(s, m), I(s, m)  need F(s, m) and B or I (s+1, m)
    W(s, m)  needs I(s, m)

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
    stored: what it needs from its own stage: a backward its forward, a W its I. Same rank.
    Where an action occurs twice, or not at all, `value` and `stored` are those of the last one,
    or -1: `verify` reports both.
    """

    value: Indices
    stored: Indices


def dependencies(schedule: Schedule) -> Dependencies:
    """The dependency graph of a schedule, without the order of each program."""
    flat = schedule.flat()
    table = _Table(flat, schedule.stages, schedule.microbatches)
    value, stored = (np.full(len(flat.kind), _NONE, dtype=np.int64) for _ in range(2))

    def fill(into: Indices, kinds: tuple[Kind, ...], *sources: Indices) -> None:
        chosen = np.isin(flat.kind, kinds)
        into[chosen] = _first(*(source[chosen] for source in sources))

    upstream, downstream, here = -1, +1, 0
    fill(value, (Kind.F,), table.find(Kind.RECV_F, here), table.find(Kind.F, upstream))
    fill(
        value,
        (Kind.B, Kind.I),
        table.find(Kind.RECV_B, here),
        table.find(Kind.B, downstream),
        table.find(Kind.I, downstream),
    )
    fill(value, (Kind.RECV_F,), table.find(Kind.SEND_F, upstream))
    fill(value, (Kind.RECV_B,), table.find(Kind.SEND_B, downstream))
    fill(value, (Kind.SEND_F,), table.find(Kind.F, here))
    fill(value, (Kind.SEND_B,), table.find(Kind.B, here), table.find(Kind.I, here))
    fill(stored, (Kind.B, Kind.I), table.find(Kind.F, here))
    fill(stored, (Kind.W,), table.find(Kind.I, here))
    return Dependencies(value=value, stored=stored)


def _first(*candidates: Indices) -> Indices:
    """Of several candidates a position, the first that exists."""
    result = candidates[-1].copy()
    for candidate in reversed(candidates[:-1]):
        np.copyto(result, candidate, where=candidate != _NONE)
    return result


class _Table:
    """Finds the flat index of any (kind, stage, microbatch)."""

    def __init__(self, flat: FlatSchedule, stages: int, microbatches: int) -> None:
        self._flat, self._stages, self._microbatches = flat, stages, microbatches
        self._tables: dict[Kind, Indices] = {}

    def find(self, kind: Kind, stage_step: int) -> Indices:
        """For each action [N]: where (kind, stage + stage_step, microbatch) stands, or -1."""
        stage = self._flat.stage + stage_step
        inside = (stage >= 0) & (stage < self._stages)
        inside &= self._flat.microbatch < self._microbatches
        found = np.full(len(stage), _NONE, dtype=np.int64)
        found[inside] = self._table(kind)[stage[inside], self._flat.microbatch[inside]]
        return found

    def _table(self, kind: Kind) -> Indices:
        if kind not in self._tables:
            flat = self._flat
            table = np.full((self._stages, self._microbatches), _NONE, dtype=np.int64)
            at = np.flatnonzero(
                (flat.kind == kind)
                & (flat.stage < self._stages)
                & (flat.microbatch < self._microbatches)
            )
            table[flat.stage[at], flat.microbatch[at]] = at
            self._tables[kind] = table
        return self._tables[kind]
