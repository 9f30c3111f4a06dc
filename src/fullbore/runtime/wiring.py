"""Wiring: every process group of a pipeline, made in one order on all ranks and torn down at once.

Groups hang off the rendezvous store of the caller's group under a name of their own, so nothing
is registered globally, and after a failure a fresh set under the next number takes their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fullbore.errors import PipelineError
from fullbore.ir import Schedule
from fullbore.runtime.control import Control
from fullbore.runtime.device import Group, Side
from fullbore.runtime.links import IncomingLink, OutgoingLink
from fullbore.runtime.meeting import Patience, Said, meet
from fullbore.runtime.witness import Witness

__all__ = ["Rendezvous", "Wiring", "pairs_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one pipeline meet: a store under a name that no other pipeline uses."""

    store: Store
    rank: int
    ranks: int
    timeout: timedelta

    @staticmethod
    def of(group: dist.ProcessGroup | None, *, timeout: timedelta) -> Rendezvous:
        """Meet through the caller's group (None: the default group); every rank must call."""
        whole = group if group is not None else dist.group.WORLD
        if not isinstance(whole, dist.ProcessGroup):  # what new_group gives to the other ranks
            raise PipelineError(
                "this rank is not in the given group: make the pipeline only on the ranks that are"
            )
        store, rank = whole.get_group_store(), whole.rank()
        number = store.add(f"fullbore/pipelines/{rank}", 1)  # the same on every rank
        return Rendezvous(
            store=PrefixStore(f"fullbore/pipeline/{number}", store),
            rank=rank,
            ranks=whole.size(),
            timeout=timeout,
        )

    def meet(self, *, life: int, said: Said, patience: Patience) -> list[str]:
        """Wait for all ranks to come to this life of the pipeline; what any of them objects to.

        Raises RankError if one does not come.
        """
        store = _life(self, life)
        return meet(store, said, rank=self.rank, ranks=self.ranks, patience=patience)


def _life(rendezvous: Rendezvous, life: int) -> Store:
    return PrefixStore(f"life{life}", rendezvous.store)


class Wiring:
    """The control group, the links and the tied groups of one rank, for one life of a pipeline.

    Made where all ranks have met without an objection.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        life: int,
        side: Side,
        records: Path | None = None,
    ) -> None:
        """records: the folder for flight records."""
        self._rendezvous, self._side = rendezvous, side
        self._store = _life(rendezvous, life)
        rank = rendezvous.rank
        self.control = Control(
            self._store, rank=rank, ranks=rendezvous.ranks, timeout=rendezvous.timeout
        )
        self.witness = Witness(self._store, rank=rank, ranks=rendezvous.ranks, folder=records)
        self.outgoing: dict[int, OutgoingLink] = {}
        self.incoming: dict[int, IncomingLink] = {}
        self.tied_groups: list[Group | None] = []

    def connect(
        self, *, pairs: Sequence[tuple[int, int]], tied_ranks: Sequence[tuple[int, ...]]
    ) -> None:
        """Make the links between these (source, destination) and a group for each tied weight."""
        for source, destination in pairs:
            self._connect(source, destination)
        self.tied_groups = [
            self._group(f"tied{index}", members) for index, members in enumerate(tied_ranks)
        ]

    def _connect(self, source: int, destination: int) -> None:
        group = self._group(f"link{source}-{destination}", (source, destination))
        if group is None:
            return
        if self._rendezvous.rank == source:
            self.outgoing[destination] = OutgoingLink(
                group=group, peer=destination, side=self._side
            )
        else:
            self.incoming[source] = IncomingLink(group=group, peer=source, side=self._side)

    def _group(self, name: str, members: tuple[int, ...]) -> Group | None:
        """A group of these ranks in this order, or None where this rank is not one of several."""
        if self._rendezvous.rank not in members or len(members) == 1:
            return None
        return self._side.make_group(
            PrefixStore(name, self._store),
            rank=members.index(self._rendezvous.rank),
            size=len(members),
            timeout=self._rendezvous.timeout,
        )

    def abort(self) -> None:
        """Close every connection at once; peers that wait in one of them fail."""
        for outgoing in self.outgoing.values():
            outgoing.abort()
        for incoming in self.incoming.values():
            incoming.abort()
        for group in self.tied_groups:
            if group is not None:
                self._side.abort(group)
        self.control.abort()

    def close(self) -> None:
        """Let go of everything once the last step is over; the next one fails on other ranks.

        Only the control connections are closed at once: a step begins there, and what still
        travels on the links gets where it belongs.
        """
        self.witness.say_closed()
        self.control.abort()
        for link in self.outgoing.values():
            link.close()


def pairs_of(schedule: Schedule) -> list[tuple[int, int]]:
    """The directed pairs (source, destination) of ranks between which messages go, in order."""
    rank_of = schedule.placement.stage_to_rank
    pairs = set()
    for here, there in pairwise(rank_of):
        if here != there:
            pairs.add((here, there))
            pairs.add((there, here))
    return sorted(pairs)
