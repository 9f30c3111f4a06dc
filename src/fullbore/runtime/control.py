"""What all ranks of a pipeline agree on around a step, and what they say when one of them fails.

A step begins with every rank learning what kind of microbatches come, and ends with every rank
learning the loss; between the two, ranks exchange nothing but activations and gradients. A failure
is written into the rendezvous store by the rank where it began; then that rank closes its
connections, its neighbours notice at once, read the cause and do the same.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from fullbore.errors import RankError
from fullbore.runtime.device import CpuSide

__all__ = ["Control", "PeerLostError"]

_FAILURE = "failure"
_GRACE_S = 1.5  # how long a rank that failed by itself may take to say so
_GIVE_UP_S = 3.5
_POLL_S = 0.02
_TAG = 0


class Control:
    """Agreement among some ranks, over gloo, and the record of a failure of any of the job's.

    store: of all ranks of the job. name: of these, which are the P ranks of one replica or all.
    rank, ranks: within them. numbers: what messages call them, by default 0, 1, ...
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
        self.rank, self.ranks, self._store = rank, ranks, store
        self.numbers = tuple(range(ranks) if numbers is None else numbers)
        self._side = CpuSide()
        self._group = self._side.make_group(
            PrefixStore(name, store), rank=rank, size=ranks, timeout=timeout
        )

    @property
    def number(self) -> int:
        """What messages call this rank."""
        return self.numbers[self.rank]

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
            posted = [
                (self.numbers[rank], self._group.recv([tensor], rank, _TAG))
                for rank, tensor in told
            ]
            return partial(self._total_at_root, mine, [tensor for _, tensor in told], posted)
        sums = torch.empty_like(mine)
        root = self.numbers[0]
        posted = [
            (root, self._group.send([mine], 0, _TAG)),
            (root, self._group.recv([sums], 0, _TAG)),
        ]
        return partial(_total_elsewhere, sums, posted)

    def _total_at_root(
        self, mine: torch.Tensor, others: list[torch.Tensor], posted: _Posted
    ) -> list[float]:
        _finish(posted)
        sums = mine.clone()
        for other in others:
            sums += other
        self._tell_everyone(sums)
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
        sent = [
            (self.numbers[rank], self._group.send([tensor], rank, _TAG))
            for rank in range(1, self.ranks)
        ]
        _finish(sent)

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """Send a small tensor to a peer and wait until it has left."""
        _finish([(self.numbers[peer], self._group.send([tensor], peer, _TAG))])

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        """Receive a small tensor from a peer."""
        _finish([(self.numbers[peer], self._group.recv([tensor], peer, _TAG))])

    def abort(self) -> None:
        """Close the control connections at once, so that no rank waits in them."""
        self._side.abort(self._group)

    def report(self, *, rank: int, action: str | None, cause: str) -> RankError:
        """Record that a rank failed, unless a failure is on record; return the one on record.

        Ranks go by their numbers, here and in `explain`.
        """
        record = json.dumps({"rank": rank, "action": action, "cause": cause})
        try:
            kept = self._store.compare_set(_FAILURE, "", record).decode()
        except (RuntimeError, dist.DistError):
            kept = record  # the store died with its rank: say what we know
        return RankError(**json.loads(kept))

    def explain(self, *, suspects: Sequence[int], owed: str | None, error: str) -> RankError:
        """Find out why a connection to one of the suspects closed while this rank was waiting.

        owed: the action whose result it was waiting for. Ranks that fail say so in the store
        before they close anything; one that says nothing has died.
        """
        try:
            self._store.set(f"down/{self.number}", "1")
            return self._explain(suspects, owed, error)
        except (RuntimeError, dist.DistError) as gone:
            cause = f"its connection closed, and the rendezvous store with it ({_first(str(gone))})"
            return RankError(rank=suspects[0] if suspects else None, action=owed, cause=cause)

    def _explain(self, suspects: Sequence[int], owed: str | None, error: str) -> RankError:
        begun_s = time.monotonic()
        while (waited_s := time.monotonic() - begun_s) < _GIVE_UP_S:
            if self._store.check([_FAILURE]):
                return RankError(**json.loads(self._store.get(_FAILURE).decode()))
            silent = [rank for rank in suspects if not self._store.check([f"down/{rank}"])]
            if waited_s > _GRACE_S and silent:
                return self._report_silence(silent[0], owed, error)
            time.sleep(_POLL_S)
        cause = f"a connection broke, yet both its ends are alive: the network? ({_first(error)})"
        return self.report(rank=self.number, action=owed, cause=cause)

    def _report_silence(self, rank: int, owed: str | None, error: str) -> RankError:
        how = "the process died without a word (killed, or out of memory?)"
        if "timed out" in error.lower():
            how = "no sign of life within timeout_s (does it hang, or was it stopped?)"
        cause = f"{how}; rank {self.number} was waiting for it"
        return self.report(rank=rank, action=owed and f"{owed} or before", cause=cause)


class PeerLostError(RuntimeError):
    """The connection to one of some ranks, by their numbers, broke while this one waited."""

    def __init__(self, peers: Sequence[int], cause: str) -> None:
        super().__init__(cause)
        self.peers = peers


_Posted = list[tuple[int, dist.Work]]  # each with the number of the rank at its other end


def _finish(posted: _Posted) -> None:
    for peer, work in posted:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError([peer], str(error)) from error


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _total_elsewhere(sums: torch.Tensor, posted: _Posted) -> list[float]:
    _finish(posted)
    return sums.tolist()


def _first(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[0]
