"""The report's data: timelines and curves as compact JSON that the page's script reads.

Columns are little-endian arrays in base64, each in the narrowest type that holds it: exact to
the last bit, a third of the size of decimal text, and decoded at once.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind
from fullbore.timeline import Timeline
from fullbore.view.palette import LABELS, ink, shade
from fullbore.view.panel import Panel, chunk_of_span, extent_s
from fullbore.view.units import TimeUnit

__all__ = ["embed_report"]

_LANES = {  # of the thin ones beneath a rank, from above; sends have the first
    Kind.RECV_F: 1,
    Kind.RECV_B: 1,
    Kind.OFFLOAD: 2,
    Kind.RELOAD: 2,
}


def embed_report(panels: Sequence[Panel], unit: TimeUnit) -> dict[str, Any]:
    """Everything that the page's script needs, as values that `json` can write."""
    return {
        "extent_s": extent_s(tuple(panels)),
        "unit": {"symbol": unit.symbol, "seconds": unit.seconds},
        "kinds": [
            {"name": kind.name, "label": LABELS[kind], "lane": _LANES.get(kind, 0)} for kind in Kind
        ],
        "panels": [_panel(panel) for panel in panels],
    }


def _panel(panel: Panel) -> dict[str, Any]:
    timeline = panel.timeline
    chunk = chunk_of_span(timeline)
    chunks = int(chunk.max(initial=0)) + 1
    colors = [[shade(kind, chunk=c, chunks=chunks) for c in range(chunks)] for kind in Kind]
    compute = timeline.is_compute
    return {
        "title": panel.title,
        "schedule": timeline.name,
        "ranks": timeline.ranks,
        "end": timeline.makespan_s,
        "colors": colors,
        "inks": [[ink(color) for color in row] for row in colors],
        "compute": _lane(timeline, chunk, compute),
        "lanes": 3 if timeline.is_copy.any() else 2,
        "communication": None if compute.all() else _lane(timeline, chunk, ~compute),
        "curve": {"name": panel.curve_name, "unit": panel.curve_unit},
        "curves": [
            {
                "times": _column(curve.times_s),
                "values": _column(curve.values),
                "peak": float(curve.values.max(initial=0.0)),
            }
            for curve in panel.curves
        ],
    }


def _lane(
    timeline: Timeline, chunk: npt.NDArray[np.int32], chosen: npt.NDArray[np.bool_]
) -> dict[str, Any]:
    """The chosen spans by rank and start; rank r's are at offsets[r]:offsets[r + 1]."""
    at = np.flatnonzero(chosen)
    at = at[np.lexsort((timeline.start_s[at], timeline.rank[at]))]
    offsets = np.searchsorted(timeline.rank[at], np.arange(timeline.ranks + 1))
    return {
        "offsets": offsets.tolist(),
        "kind": _column(timeline.kind[at]),
        "stage": _column(timeline.stage[at]),
        "microbatch": _column(timeline.microbatch[at]),
        "chunk": _column(chunk[at]),
        "start": _column(timeline.start_s[at]),
        "end": _column(timeline.end_s[at]),
    }


def _column(values: npt.NDArray[Any]) -> list[str]:
    """A column as [type, base64]: f8, or the narrowest of u1, u2 and u4."""
    if values.dtype.kind == "f":
        code = "f8"
    else:
        most = int(values.max(initial=0))
        code = "u1" if most < 2**8 else "u2" if most < 2**16 else "u4"
    return [code, b64encode(values.astype("<" + code).tobytes()).decode("ascii")]
