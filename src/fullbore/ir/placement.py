"""Which rank holds which stage: a part of the schedule, and data, never code.

Looped, V and wave placements are tables of the same type, so nothing downstream has a case
for any of them. A bidirectional pipeline holds its stages twice, and microbatches take turns
between the two copies of the model: that is one more table.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from fullbore.errors import ScheduleError

__all__ = ["MOST_ACTIONS", "MOST_RANKS", "Placement"]

MOST_RANKS = 8192

# A schedule this large takes about 2 GB as arrays; P=1024, v=32, M=1024 has 67 million.
MOST_ACTIONS = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """stage_to_rank[s] is the rank that holds stage s. Every rank 0..P-1 holds at least one.

    copies: further copies of the model, each such a table; of C copies in all, the first one
    included, microbatch m runs on copy m mod C.
    """

    stage_to_rank: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if any(len(copy) != len(self.stage_to_rank) for copy in self.copies):
            raise ScheduleError("copies of a model have as many stages as the model")
        present = set(chain(self.stage_to_rank, *self.copies))
        if not present or present != set(range(max(present) + 1)):
            missing = sorted(set(range(max(present, default=0) + 1)) - present)
            raise ScheduleError(
                f"rank {missing[0]} holds no stage: give each rank 0..{max(present, default=0)} "
                "at least one stage, or use fewer ranks"
            )

    @staticmethod
    def looped(*, ranks: int, virtual_stages: int = 1) -> Placement:
        """Stage s on rank s mod P: Megatron's interleaving (and plain stages where v = 1)."""
        return Placement(stage_to_rank=tuple(range(ranks)) * virtual_stages)

    @staticmethod
    def v(*, ranks: int) -> Placement:
        """Two stages a rank, down the ranks and up again: first and last stage on rank 0."""
        return Placement.wave(ranks=ranks, virtual_stages=2)

    @staticmethod
    def wave(*, ranks: int, virtual_stages: int) -> Placement:
        """v stages a rank, down the ranks and up in turn: where it turns, two stages that follow
        each other are on one rank.
        """
        down = tuple(range(ranks))
        turns = (down if turn % 2 == 0 else down[::-1] for turn in range(virtual_stages))
        return Placement(stage_to_rank=tuple(rank for turn in turns for rank in turn))

    @staticmethod
    def both_ways(*, ranks: int) -> Placement:
        """The model twice, stage s on rank s and on rank P-1-s: even microbatches enter at rank 0,
        odd ones at the last rank.
        """
        down = tuple(range(ranks))
        return Placement(stage_to_rank=down, copies=(down[::-1],))

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.stage_to_rank)

    @property
    def ranks(self) -> int:
        """P, the number of ranks."""
        return max(chain(self.stage_to_rank, *self.copies)) + 1

    @property
    def tables(self) -> npt.NDArray[np.int32]:
        """Which rank holds a stage, for each copy of the model [C, S]."""
        return np.array([self.stage_to_rank, *self.copies], dtype=np.int32)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, of any copy, in the model's order."""
        holders = zip(self.stage_to_rank, *self.copies, strict=True)
        return tuple(s for s, ranks in enumerate(holders) if rank in ranks)
