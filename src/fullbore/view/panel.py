"""What one picture shows: a timeline with its title, its memory curves and a few facts.

Panels stand one above the other on a common time axis: prediction above measurement, or one
schedule above the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.timeline import Curve, Timeline

__all__ = ["BYTES", "Panel", "chunk_of_span", "extent_s"]

BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One timeline to draw.

    curves: one a rank, or none at all. facts: short lines that stand beneath the title, such as
    "bubble fraction 27.3 %". curve_unit: what the curves count; `BYTES` is printed as MiB or GiB.
    """

    title: str
    timeline: Timeline
    curves: tuple[Curve, ...] = ()
    facts: tuple[str, ...] = ()
    curve_name: str = "live activations"
    curve_unit: str = "microbatches × 1/P of the model"

    def __post_init__(self) -> None:
        assert len(self.curves) in (0, self.timeline.ranks), "give one curve a rank, or none"


def chunk_of_span(timeline: Timeline) -> npt.NDArray[np.int32]:
    """For each span [n], which of its rank's stages it belongs to: 0 is the rank's first."""
    stages = int(timeline.stage.max(initial=0)) + 1
    key = timeline.rank.astype(np.int64) * stages + timeline.stage
    present, where = np.unique(key, return_inverse=True)
    rank = present // stages
    chunk = np.arange(len(present)) - np.searchsorted(rank, rank)
    chosen: npt.NDArray[np.int32] = chunk[where].astype(np.int32)
    return chosen


def extent_s(panels: tuple[Panel, ...]) -> float:
    """How long the common time axis is: to the last end of any span, never 0."""
    ends = [float(panel.timeline.end_s.max()) for panel in panels if len(panel.timeline)]
    return max([end for end in ends if end > 0.0], default=1.0)
