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

__all__ = ["Control", "PeerLostError"]

_TAG = 0


class Control:
    """Agreement among the P ranks of a pipeline, over gloo.

    waits_for: the rank that this one waits for just now, None if for none.
    """

    def __init__(self, store: Store, *, rank: int, ranks: int, timeout: timedelta) -> None:
        self.rank, self.ranks = rank, ranks
        self.waits_for: int | None = None
        self._side = CpuSide()
        self._group = self._side.make_group(
            PrefixStore("control", store), rank=rank, size=ranks, timeout=timeout
        )

    def begin_total(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Begin to sum values elementwise over all ranks; the result waits, and gives the sums.

        Everyone tells rank 0, and rank 0 tells everyone: two hops, whatever P is, and one where
        rank 0 comes last. The sums are bitwise the same on every rank.
        """
        mine = torch.tensor(values, dtype=torch.float64)
        if self.ranks == 1:
            return mine.tolist
        if self.rank == 0:
            told = [(rank, torch.empty_like(mine)) for rank in range(1, self.ranks)]
            posted = [(rank, self._group.recv([tensor], rank, _TAG)) for rank, tensor in told]
            return partial(self._total_at_root, mine, [tensor for _, tensor in told], posted)
        sums = torch.empty_like(mine)
        posted = [
            (0, self._group.send([mine], 0, _TAG)),
            (0, self._group.recv([sums], 0, _TAG)),
        ]
        return partial(self._total_elsewhere, sums, posted)

    def _total_at_root(
        self, mine: torch.Tensor, others: list[torch.Tensor], posted: _Posted
    ) -> list[float]:
        self._finish(posted)
        sums = mine.clone()
        for other in others:
            sums += other
        self._tell_everyone(sums)
        return sums.tolist()

    def _total_elsewhere(self, sums: torch.Tensor, posted: _Posted) -> list[float]:
        self._finish(posted)
        return sums.tolist()

    def total(self, values: Sequence[float]) -> list[float]:
        """The elementwise sums over all ranks, on every rank."""
        return self.begin_total(values)()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank; by way of rank 0."""
        if self.rank == 0:
            values = [value, *(self._receive_value(rank) for rank in range(1, self.ranks))]
            body = _pickled(values)
            self._tell_everyone(torch.tensor([len(body)]))
            self._tell_everyone(body)
            return values
        body = _pickled(value)
        self.send(0, torch.tensor([len(body)]))
        self.send(0, body)
        gathered: list[Any] = self._receive_value(0)
        return gathered

    def _receive_value(self, peer: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self.receive(peer, length)
        body = torch.empty(int(length), dtype=torch.uint8)
        self.receive(peer, body)
        return pickle.loads(body.numpy().tobytes())

    def _tell_everyone(self, tensor: torch.Tensor) -> None:
        others = range(1, self.ranks)
        self._finish([(rank, self._group.send([tensor], rank, _TAG)) for rank in others])

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """Send a small tensor to a peer and wait until it has left."""
        self._finish([(peer, self._group.send([tensor], peer, _TAG))])

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        """Receive a small tensor from a peer."""
        self._finish([(peer, self._group.recv([tensor], peer, _TAG))])

    def _finish(self, posted: _Posted) -> None:
        for peer, work in posted:
            self.waits_for = peer
            try:
                work.wait()
            except RuntimeError as error:
                raise PeerLostError(peer, str(error)) from error
        self.waits_for = None

    def abort(self) -> None:
        """Close the control connections at once, so that no rank waits in them."""
        self._side.abort(self._group)


class PeerLostError(RuntimeError):
    """The connection to a rank of the pipeline broke while this one waited for it."""

    def __init__(self, peer: int, cause: str) -> None:
        super().__init__(cause)
        self.peer = peer


_Posted = list[tuple[int, dist.Work]]  # each with the rank at its other end


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
