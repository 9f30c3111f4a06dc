"""A timeline: what each rank did when, simulated or measured, in one type.

Simulator and runtime meet here: both give a Timeline, so metrics, pictures and comparisons
never ask which of the two they look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fullbore.ir import Action, Kind

__all__ = ["Span", "Timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of one rank, from start to end in seconds on the timeline's clock."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Spans of all ranks as arrays of one length [n], sorted by rank, then as the rank ran them.

    Times are seconds on one clock for all ranks, 0 where the step began. Compute spans of a rank
    do not overlap. OFFLOAD and RELOAD spans stand where the rank came to them and last as long as
    their copies, one after the other, while the rank goes on. A RECV span lasts from beginning to
    wait for a message until it was there; a SEND span from handing it over until it has left
    (simulated, or measured with blocking sends) or until the rank may go on (measured, with sends
    that overlap: gloo does not tell more).
    """

    source: Literal["simulated", "measured"]
    name: str  # of the schedule
    ranks: int
    rank: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    start_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rank)

    def __iter__(self) -> Iterator[Span]:
        for index in range(len(self)):
            yield Span(
                rank=int(self.rank[index]),
                action=Action(
                    stage=int(self.stage[index]),
                    kind=Kind(int(self.kind[index])),
                    microbatch=int(self.microbatch[index]),
                ),
                start_s=float(self.start_s[index]),
                end_s=float(self.end_s[index]),
            )

    @property
    def is_compute(self) -> npt.NDArray[np.bool_]:
        """Which spans [n] are compute (F, B, I, W, R)."""
        return self.kind < Kind.OFFLOAD

    @property
    def is_copy(self) -> npt.NDArray[np.bool_]:
        """Which spans [n] are copies between a rank and its host (OFFLOAD, RELOAD)."""
        return (self.kind >= Kind.OFFLOAD) & (self.kind < Kind.SEND_F)

    @property
    def makespan_s(self) -> float:
        """From 0 to the end of the last compute action of any rank."""
        compute = self.is_compute
        return float(self.end_s[compute].max()) if compute.any() else 0.0
