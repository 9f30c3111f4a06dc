"""Wiring: every process group of a pipeline, made in one order on all ranks and torn down at once.

Groups hang off the rendezvous store of the caller's group under a name of their own, so nothing
is registered globally, and after a failure a fresh set under the next number takes their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fullbore.errors import PipelineError
from fullbore.ir import Schedule
from fullbore.runtime.control import Control
from fullbore.runtime.device import Group, Side
from fullbore.runtime.links import IncomingLink, OutgoingLink
from fullbore.runtime.meeting import Patience, Said, meet
from fullbore.runtime.witness import Witness

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Rendezvous", "Wiring", "pairs_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one pipeline meet: a store under a name that no other pipeline uses.

    rank, ranks: within one replica. numbers: what messages call the ranks of each replica [D][P],
    as in the caller's default group where there are several replicas.
    """

    store: Store
    rank: int
    ranks: int
    timeout: timedelta
    replica: int = 0
    numbers: tuple[tuple[int, ...], ...] = ()

    @property
    def replicas(self) -> int:
        """D."""
        return max(1, len(self.numbers))

    @property
    def everyone(self) -> tuple[int, ...]:
        """The numbers of all D x P ranks, replica by replica."""
        if not self.numbers:
            return tuple(range(self.ranks))
        return tuple(number for row in self.numbers for number in row)

    @property
    def number(self) -> int:
        """What messages call this rank."""
        return self.everyone[self.replica * self.ranks + self.rank]

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

    @staticmethod
    def of_mesh(mesh: DeviceMesh, *, timeout: timedelta) -> Rendezvous:
        """Meet through a mesh with the dimensions "dp" and "pp"; each of its ranks must call."""
        names = mesh.mesh_dim_names or ()
        if sorted(names) != ["dp", "pp"]:
            raise PipelineError(
                f'mesh has the dimensions {list(names)}: make one with "dp" and "pp", such as '
                'init_device_mesh("cpu", (D, P), mesh_dim_names=("dp", "pp"))'
            )
        if mesh.get_coordinate() is None or dist.group.WORLD is None:
            raise PipelineError(
                "this rank is not in the given mesh: make the pipeline only on the ranks that are"
            )
        table = mesh.mesh if names[0] == "dp" else mesh.mesh.t()
        name, store = "-".join(map(str, table.flatten().tolist())), dist.group.WORLD
        place = f"fullbore/mesh/{hashlib.sha256(name.encode()).hexdigest()}"
        root = PrefixStore(place, store.get_group_store())
        number = root.add(f"made/{dist.get_rank()}", 1)  # the same on every rank
        return Rendezvous(
            store=PrefixStore(f"pipeline/{number}", root),
            rank=mesh.get_local_rank("pp"),
            ranks=table.shape[1],
            timeout=timeout,
            replica=mesh.get_local_rank("dp"),
            numbers=tuple(tuple(row) for row in table.tolist()),
        )

    def meet(self, *, life: int, said: Said, patience: Patience) -> list[str]:
        """Wait for all ranks to come to this life of the pipeline; what any of them objects to.

        Raises RankError if one does not come.
        """
        return meet(
            _life(self, life), said, rank=self.number, numbers=self.everyone, patience=patience
        )


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
        self._whole = whole = _life(rendezvous, life)
        self._store = PrefixStore(f"replica{rendezvous.replica}", whole)
        numbers = rendezvous.numbers[rendezvous.replica] if rendezvous.numbers else None
        self.control = Control(
            whole,
            rank=rendezvous.rank,
            ranks=rendezvous.ranks,
            timeout=rendezvous.timeout,
            name=f"control{rendezvous.replica}",
            numbers=numbers,
        )
        self.world = self.control if rendezvous.replicas == 1 else self._join_all()
        self.witness = Witness(
            whole, rank=rendezvous.number, numbers=rendezvous.everyone, folder=records
        )
        self.outgoing: dict[int, OutgoingLink] = {}
        self.incoming: dict[int, IncomingLink] = {}
        self.tied_groups: list[Group | None] = []
        self.replica_group: Group | None = None  # of the ranks that hold copies of these stages

    def connect(
        self, *, pairs: Sequence[tuple[int, int]], tied_ranks: Sequence[tuple[int, ...]]
    ) -> None:
        """Make the links between these (source, destination) and a group for each tied weight."""
        for source, destination in pairs:
            self._connect(source, destination)
        self.tied_groups = [
            self._group(f"tied{index}", members) for index, members in enumerate(tied_ranks)
        ]
        rendezvous = self._rendezvous
        if rendezvous.replicas > 1:
            self.replica_group = self._side.make_group(
                PrefixStore(f"copies{rendezvous.rank}", self._whole),
                rank=rendezvous.replica,
                size=rendezvous.replicas,
                timeout=rendezvous.timeout,
            )

    def _join_all(self) -> Control:
        """What all ranks of all replicas agree through."""
        rendezvous = self._rendezvous
        return Control(
            self._whole,
            rank=rendezvous.replica * rendezvous.ranks + rendezvous.rank,
            ranks=rendezvous.replicas * rendezvous.ranks,
            timeout=rendezvous.timeout,
            name="world",
            numbers=rendezvous.everyone,
        )

    def _connect(self, source: int, destination: int) -> None:
        group = self._group(f"link{source}-{destination}", (source, destination))
        if group is None:
            return
        numbers = self.control.numbers
        if self._rendezvous.rank == source:
            self.outgoing[destination] = OutgoingLink(
                group=group, peer=destination, number=numbers[destination], side=self._side
            )
        else:
            self.incoming[source] = IncomingLink(
                group=group, peer=source, number=numbers[source], side=self._side
            )

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
        for group in (*self.tied_groups, self.replica_group):
            if group is not None:
                self._side.abort(group)
        self._abort_controls()

    def _abort_controls(self) -> None:
        self.control.abort()
        if self.world is not self.control:
            self.world.abort()

    def close(self) -> None:
        """Let go of everything once the last step is over; the next one fails on other ranks.

        Only the control connections are closed at once: a step begins there, and what still
        travels on the links gets where it belongs.
        """
        self.witness.say_closed()
        self._abort_controls()
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
