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

__all__ = ["Control"]

_FAILURE = "failure"
_GRACE_S = 1.5  # how long a rank that failed by itself may take to say so
_GIVE_UP_S = 3.5
_POLL_S = 0.02


class Control:
    """Agreement among the P ranks of a pipeline, over gloo, and the record of a failure."""

    def __init__(self, store: Store, *, rank: int, ranks: int, timeout: timedelta) -> None:
        self.rank, self.ranks, self._store = rank, ranks, store
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
            others = [torch.empty_like(mine) for _ in range(self.ranks - 1)]
            received = [self._group.recv([t], r, 0) for r, t in enumerate(others, start=1)]
            return partial(self._total_at_root, mine, others, received)
        sums = torch.empty_like(mine)
        sent = self._group.send([mine], 0, 0)
        return partial(_total_elsewhere, sums, [sent, self._group.recv([sums], 0, 0)])

    def _total_at_root(
        self, mine: torch.Tensor, others: list[torch.Tensor], received: list[dist.Work]
    ) -> list[float]:
        sums = mine.clone()
        for work, other in zip(received, others, strict=True):
            work.wait()
            sums += other
        sent = [self._group.send([sums], rank, 0) for rank in range(1, self.ranks)]
        for work in sent:
            work.wait()
        return sums.tolist()

    def total(self, values: Sequence[float]) -> list[float]:
        """The elementwise sums over all ranks, on every rank."""
        return self.begin_total(values)()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable value, in rank order, on every rank."""
        body = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        if self.ranks == 1:
            return [value]
        sizes = self._gather_tensor(torch.tensor([len(body)]))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
        padded[: len(body)] = body
        bodies = self._gather_tensor(padded)
        return [
            pickle.loads(b[: int(size)].numpy().tobytes())
            for b, size in zip(bodies, sizes, strict=True)
        ]

    def _gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """Send a small tensor to a peer and wait until it has left."""
        self._group.send([tensor], peer, 0).wait()

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        """Receive a small tensor from a peer."""
        self._group.recv([tensor], peer, 0).wait()

    def abort(self) -> None:
        """Close the control connections at once, so that no rank waits in them."""
        if self.ranks > 1:
            self._side.abort(self._group, peer=(self.rank + 1) % self.ranks)

    def report(self, *, rank: int, action: str | None, cause: str) -> RankError:
        """Record that a rank failed, unless a failure is on record; return the one on record."""
        record = json.dumps({"rank": rank, "action": action, "cause": cause})
        try:
            kept = self._store.compare_set(_FAILURE, "", record).decode()
        except (RuntimeError, dist.DistError):
            kept = record  # the store died with its rank: say what we know
        return RankError(**json.loads(kept))

    def explain(self, *, peer: int | None, owed: str | None, error: str) -> RankError:
        """Find out why a connection to `peer` closed while this rank waited for `owed`.

        Ranks that fail say so in the store; a peer that says nothing has died.
        """
        try:
            self._store.set(f"down/{self.rank}", "1")
            return self._explain(peer=peer, owed=owed, error=error)
        except (RuntimeError, dist.DistError) as gone:
            cause = f"its connection closed, and the rendezvous store with it ({_line(gone)})"
            return RankError(rank=peer, action=owed, cause=cause)

    def _explain(self, *, peer: int | None, owed: str | None, error: str) -> RankError:
        begun = time.monotonic()
        while (waited := time.monotonic() - begun) < _GIVE_UP_S:
            if self._store.check([_FAILURE]):
                return RankError(**json.loads(self._store.get(_FAILURE).decode()))
            if waited > _GRACE_S and peer is not None and self._silent(peer):
                return self._report_death(peer, owed)
            time.sleep(_POLL_S)
        silent = [rank for rank in range(self.ranks) if self._silent(rank)]
        if silent:
            return self._report_death(silent[0], owed)
        cause = f"a connection broke, yet every rank is alive: the network? ({error})"
        return self.report(rank=self.rank, action=owed, cause=cause)

    def _silent(self, rank: int) -> bool:
        return not self._store.check([f"down/{rank}"])

    def _report_death(self, rank: int, owed: str | None) -> RankError:
        cause = (
            "the process died without a word (killed, or out of memory?); "
            f"rank {self.rank} was waiting for it"
        )
        return self.report(rank=rank, action=owed and f"{owed} or before", cause=cause)


def _total_elsewhere(sums: torch.Tensor, works: list[dist.Work]) -> list[float]:
    for work in works:
        work.wait()
    return sums.tolist()


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
