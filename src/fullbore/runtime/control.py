"""What all ranks of a pipeline agree on around a step.

A step begins with every rank learning what kind of microbatches come, and ends with every rank
learning the loss; between the two, ranks exchange nothing but activations and gradients.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fullbore.runtime.device import CpuSide

__all__ = ["Control", "PeerLostError", "is_of_a_connection"]

# Tags keep apart what ranks that call different methods say to one another: if messages of unlike
# sizes met, gloo would end the process. So ranks wait, and are told who waits for whom, and where.
_TAG, _TOLD, _TOTAL = 0, 1, 2


def _total_tag(count: int, *, late: bool) -> int:
    return _TOTAL + 2 * count + late


class Control:
    """Agreement among some ranks of the job, over gloo.

    store: of all ranks of the job. name: of these, which are the P ranks of one replica or all.
    rank, ranks: within them. numbers: what messages call them, by default 0, 1, ...
    waits_for: the number of the rank that this one waits for just now, None if for none.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        ranks: int,
        timeout: timedelta,
        name: str = "control",
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.numbers = tuple(range(ranks) if numbers is None else numbers)
        self._side = CpuSide()
        self._telling: _Posted = []
        self.waits_for: int | None = None
        self._group = self._side.make_group(
            PrefixStore(name, store), rank=rank, size=ranks, timeout=timeout
        )

    @property
    def number(self) -> int:
        """What messages call this rank."""
        return self.numbers[self.rank]

    def begin_total(
        self, values: Sequence[float], *, late: bool = False
    ) -> Callable[[], list[float]]:
        """Begin to sum values elementwise over all ranks; the result waits, and gives the sums.

        Everyone tells rank 0, and rank 0 tells everyone: two hops, whatever P is, and one where
        rank 0 comes last. The sums are bitwise the same on every rank. late: other agreements
        may begin and end before this one is waited for.
        """
        tag = _total_tag(len(values), late=late)
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self.ranks == 1:
            return mine.tolist
        if self.rank == 0:
            told = [(rank, torch.empty_like(mine)) for rank in range(1, self.ranks)]
            posted = [self._heard(rank, tensor, tag) for rank, tensor in told]
            return partial(self._total_at_root, mine, [tensor for _, tensor in told], posted, tag)
        sums = torch.empty_like(mine)
        posted = [self._told(0, mine, tag), self._heard(0, sums, tag)]
        return partial(self._total_elsewhere, sums, posted)

    def _total_at_root(
        self, mine: torch.Tensor, others: list[torch.Tensor], posted: _Posted, tag: int
    ) -> list[float]:
        self._finish(posted)
        sums = mine.clone()
        for other in others:
            sums += other
        self._tell_everyone(sums, tag)
        return sums.tolist()

    def _total_elsewhere(self, sums: torch.Tensor, posted: _Posted) -> list[float]:
        self._finish(posted)
        return sums.tolist()

    def begin_to_tell(self, teller: int, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to give one rank's values to all; the result waits, and gives them.

        The others' own values only say how many there are. The teller waits for nobody.
        """
        told = torch.tensor(values, dtype=torch.float64, device="cpu")
        if self.rank != teller:
            posted = [self._heard(teller, told, _TOLD)]
            return partial(self._total_elsewhere, told, posted)
        self._finish(self._telling)  # of the step before: heard long ago
        others = [rank for rank in range(self.ranks) if rank != teller]
        self._telling = [self._told(rank, told, _TOLD) for rank in others]
        return told.tolist

    def total(self, values: Sequence[float]) -> list[float]:
        """The elementwise sums over all ranks, on every rank."""
        return self.begin_total(values)()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank; by way of rank 0."""
        if self.rank == 0:
            values = [value, *(self._receive_value(rank) for rank in range(1, self.ranks))]
            body = _pickled(values)
            self._tell_everyone(torch.tensor([len(body)], device="cpu"))
            self._tell_everyone(body)
            return values
        body = _pickled(value)
        self.send(0, torch.tensor([len(body)], device="cpu"))
        self.send(0, body)
        gathered: list[Any] = self._receive_value(0)
        return gathered

    def _receive_value(self, peer: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.receive(peer, length)
        body = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.receive(peer, body)
        return pickle.loads(body.numpy().tobytes())

    def _tell_everyone(self, tensor: torch.Tensor, tag: int = _TAG) -> None:
        self._finish([self._told(rank, tensor, tag) for rank in range(1, self.ranks)])

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """Send a small tensor to a peer and wait until it has left."""
        self._finish([self._told(peer, tensor, _TAG)])

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        """Receive a small tensor from a peer."""
        self._finish([self._heard(peer, tensor, _TAG)])

    def _told(self, peer: int, tensor: torch.Tensor, tag: int) -> _OnePosted:
        return self._posted(peer, lambda: self._group.send([tensor], peer, tag))

    def _heard(self, peer: int, tensor: torch.Tensor, tag: int) -> _OnePosted:
        return self._posted(peer, lambda: self._group.recv([tensor], peer, tag))

    def _posted(self, peer: int, post: Callable[[], dist.Work]) -> _OnePosted:
        """Post a message to or from a peer; gloo refuses to if the connection has broken."""
        try:
            return self.numbers[peer], post()
        except RuntimeError as error:
            raise PeerLostError([self.numbers[peer]], str(error)) from error

    def _finish(self, posted: _Posted) -> None:
        for peer, work in posted:
            self.waits_for = peer
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLostError([peer], str(error)) from error
        self.waits_for = None

    def abort(self) -> None:
        """Close the control connections at once, so that no rank waits in them."""
        self._side.abort(self._group)


class PeerLostError(RuntimeError):
    """The connection to one of some ranks, by their numbers, broke while this one waited."""

    def __init__(self, peers: Sequence[int], cause: str) -> None:
        super().__init__(cause)
        self.peers = peers


_OF_GLOO = ("gloo", "pair closure")  # its source files, mostly; not where a wait ran out before


def is_of_a_connection(error: BaseException) -> bool:
    """Whether gloo or NCCL lost a connection, and not the code of a stage something else."""
    if isinstance(error, dist.DistError | PeerLostError):
        return True
    return type(error) is RuntimeError and any(mark in str(error) for mark in _OF_GLOO)


_OnePosted = tuple[int, dist.Work]  # with the number of the rank at its other end
_Posted = list[_OnePosted]


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
