"""Panels as a Perfetto trace (TrackEvent protobuf), for ui.perfetto.dev and its SQL.

A process a rank; beneath it compute, communication, copies to the host and live activations, each
on a track of its own. Events are named as actions everywhere, their category is the kind, and stage
and microbatch are debug annotations. Perfetto's JSON import is legacy and is not written.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind
from fullbore.timeline import Curve
from fullbore.view.panel import BYTES, Panel

__all__ = ["render"]

_SEQUENCE = 1  # all packets are of one writer
_COMPUTE, _COMMUNICATION, _COPIES = "compute", "communication", "copies"


def render(panels: Sequence[Panel]) -> bytes:
    """The panels as one trace, times in nanoseconds from the beginning of each step.

    Messages may be under way at the same time; then the communication track has several rows.
    """
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace  # 0.1 s, so only here

    writer = _Writer(trace=Trace())
    for panel in panels:
        for rank in range(panel.timeline.ranks):
            title = f"{panel.title}: rank {rank}" if len(panels) > 1 else f"rank {rank}"
            _rank(writer, panel, rank, title=title)
    serialized: bytes = writer.trace.SerializeToString()
    return serialized


def _rank(writer: _Writer, panel: Panel, rank: int, *, title: str) -> None:
    timeline = panel.timeline
    process = writer.process(title)
    compute = np.flatnonzero((timeline.rank == rank) & timeline.is_compute)
    track = writer.child(process, _COMPUTE, order=0)
    writer.spans(track, panel, compute)
    messages = np.flatnonzero((timeline.rank == rank) & (timeline.kind >= Kind.SEND_F))
    for row in _rows(timeline.start_s[messages], timeline.end_s[messages]):
        track = writer.child(process, _COMMUNICATION, order=1)
        writer.spans(track, panel, messages[row])
    copies = np.flatnonzero((timeline.rank == rank) & timeline.is_copy)
    if len(copies):
        track = writer.child(process, _COPIES, order=2)
        writer.spans(track, panel, copies)
    if panel.curves:
        track = writer.child(process, panel.curve_name, order=3)
        writer.curve(track, panel.curves[rank], unit=panel.curve_unit)


def _rows(start_s: npt.NDArray[np.float64], end_s: npt.NDArray[np.float64]) -> list[list[int]]:
    """Spans that may overlap as rows of spans that don't: each to the row that is free first."""
    rows: list[list[int]] = []
    free: list[tuple[float, int]] = []
    for index in np.argsort(start_s, kind="stable").tolist():
        if free and free[0][0] <= start_s[index]:
            _, row = heapq.heappop(free)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(index)
        heapq.heappush(free, (float(end_s[index]), row))
    return rows


@dataclass(slots=True, kw_only=True)
class _Writer:
    """Adds tracks and events to a trace, and numbers the tracks."""

    trace: Any  # perfetto's Trace; its classes carry no types
    tracks: int = 0
    processes: int = 0

    def _descriptor(self, name: str, *, order: int) -> Any:
        self.tracks += 1
        packet = self.trace.packet.add(trusted_packet_sequence_id=_SEQUENCE)
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.name, descriptor.sibling_order_rank = self.tracks, name, order
        return descriptor

    def process(self, name: str) -> int:
        """A new process; returns its track. The first has number 1, as 0 is the kernel's."""
        self.processes += 1
        descriptor = self._descriptor(name, order=self.processes)
        descriptor.process.pid = self.processes
        descriptor.process.process_name = name
        descriptor.child_ordering = descriptor.EXPLICIT
        return int(descriptor.uuid)

    def child(self, parent: int, name: str, *, order: int) -> int:
        """A new track beneath a process; those of one name are shown as rows of one track."""
        descriptor = self._descriptor(name, order=order)
        descriptor.parent_uuid = parent
        return int(descriptor.uuid)

    def spans(self, track: int, panel: Panel, spans: npt.NDArray[np.int64]) -> None:
        """A slice for each of these spans, which must not overlap."""
        timeline = panel.timeline
        for kind, stage, microbatch, start_ns, end_ns in zip(
            timeline.kind[spans].tolist(),
            timeline.stage[spans].tolist(),
            timeline.microbatch[spans].tolist(),
            _nanoseconds(timeline.start_s[spans]),
            _nanoseconds(timeline.end_s[spans]),
            strict=True,
        ):
            event = self._event(track, start_ns)
            event.type = event.TYPE_SLICE_BEGIN
            event.name = f"{stage}{Kind(kind).name}{microbatch}"
            event.categories.append(Kind(kind).name)
            event.debug_annotations.add(name="stage", int_value=stage)
            event.debug_annotations.add(name="microbatch", int_value=microbatch)
            event = self._event(track, end_ns)
            event.type = event.TYPE_SLICE_END

    def curve(self, track: int, curve: Curve, *, unit: str) -> None:
        """The counter's values on a track made for it."""
        descriptor = self.trace.packet[-1].track_descriptor
        descriptor.counter.unit_name = unit
        if unit == BYTES:
            descriptor.counter.unit = descriptor.counter.UNIT_SIZE_BYTES
        for time_ns, value in zip(_nanoseconds(curve.times_s), curve.values.tolist(), strict=True):
            event = self._event(track, time_ns)
            event.type = event.TYPE_COUNTER
            event.double_counter_value = value

    def _event(self, track: int, time_ns: int) -> Any:
        packet = self.trace.packet.add(timestamp=time_ns, trusted_packet_sequence_id=_SEQUENCE)
        event = packet.track_event
        event.track_uuid = track
        return event


def _nanoseconds(times_s: npt.NDArray[np.float64]) -> list[int]:
    """Seconds as whole nanoseconds; before the step began there is nothing."""
    nanoseconds: list[int] = np.maximum(np.round(times_s * 1e9), 0).astype(np.int64).tolist()
    return nanoseconds
