"""Which rank holds which stage: a part of the schedule, and data, never code.

Looped, V and wave placements are tables of the same type, so nothing downstream has a case
for any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullbore.errors import ScheduleError

__all__ = ["MOST_ACTIONS", "MOST_RANKS", "Placement"]

MOST_RANKS = 8192

# A schedule this large takes about 2 GB as arrays; P=1024, v=32, M=1024 has 67 million.
MOST_ACTIONS = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """stage_to_rank[s] is the rank that holds stage s. Every rank 0..P-1 holds at least one."""

    stage_to_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        present = set(self.stage_to_rank)
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

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.stage_to_rank)

    @property
    def ranks(self) -> int:
        """P, the number of ranks."""
        return max(self.stage_to_rank) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the model's order."""
        return tuple(s for s, r in enumerate(self.stage_to_rank) if r == rank)
