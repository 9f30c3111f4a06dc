"""Keepers: sent tensors are held until their sends have completed, never less.

When has a send completed? NCCL can be asked. Gloo can only be waited for, and a thread that waits
costs a wake-up a message, which on a busy machine is as much as everything else that the engine
does for it. So on gloo the schedule itself answers: what has arrived here from a rank proves what
that rank had taken when it sent it, and what others had; from the first moment at which a send is
known to have completed, its tensors are no longer held.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["CausalKeeper", "Keeper", "PollingKeeper"]

_Kept = tuple[list[dist.Work], list[torch.Tensor]]


class Keeper(Protocol):
    """Holds the messages sent on one link."""

    def begin(self, taken: Sequence[int], *, window: int) -> None:
        """A step begins; taken[k]: how many messages are surely taken when the k-th is sent."""

    def keep(self, works: list[dist.Work], tensors: list[torch.Tensor]) -> None:
        """Hold the tensors of the message just sent."""

    def returned(self, count: int) -> None:
        """A message has arrived that proves the first `count` of this step's to be taken."""

    def finish(self) -> None:
        """The step is over on every rank."""

    def close(self) -> None:
        """No more messages."""


class CausalKeeper:
    """For gloo: lets go of what must have been taken.

    Where more than the peer's window would pile up (GPipe sends M forwards before anything comes
    back), the oldest go to a thread that waits for them.
    """

    def __init__(self) -> None:
        self._held: deque[_Kept] = deque()
        self._taken: Sequence[int] = ()
        self._sent = self._released = self._window = 0
        self._overflow: queue.SimpleQueue[_Kept | None] | None = None

    def begin(self, taken: Sequence[int], *, window: int) -> None:
        self._taken, self._window, self._sent, self._released = taken, window, 0, 0

    def keep(self, works: list[dist.Work], tensors: list[torch.Tensor]) -> None:
        self.returned(self._taken[self._sent])
        self._sent += 1
        self._held.append((works, tensors))
        if len(self._held) > self._window:
            self._released += 1
            self._hand_over(self._held.popleft())

    def returned(self, count: int) -> None:
        while self._released < count:
            self._release()

    def finish(self) -> None:
        while self._held:
            self._release()

    def close(self) -> None:
        self._held.clear()
        if self._overflow is not None:
            self._overflow.put(None)

    def _release(self) -> None:
        works, _ = self._held.popleft()
        self._released += 1
        for work in works:
            work.wait()  # returns at once

    def _hand_over(self, kept: _Kept) -> None:
        if self._overflow is None:
            self._overflow = queue.SimpleQueue()
            threading.Thread(
                target=_hold, args=(self._overflow,), name="fullbore-sent", daemon=True
            ).start()
        self._overflow.put(kept)


def _hold(overflow: queue.SimpleQueue[_Kept | None]) -> None:
    while _hold_one(overflow.get()):
        pass


def _hold_one(kept: _Kept | None) -> bool:
    """Wait until one message has left; its tensors go with this function's frame."""
    if kept is None:
        return False
    try:
        for work in kept[0]:
            work.wait()
    except RuntimeError:
        pass  # the peer is gone: this rank finds out where it waits next
    return True


class PollingKeeper:
    """For NCCL: asks at each send which of those before it have completed."""

    def __init__(self) -> None:
        self._held: deque[_Kept] = deque()

    def begin(self, taken: Sequence[int], *, window: int) -> None:
        pass

    def keep(self, works: list[dist.Work], tensors: list[torch.Tensor]) -> None:
        self._held.append((works, tensors))
        self.finish()

    def returned(self, count: int) -> None:
        self.finish()

    def finish(self) -> None:
        while self._held and all(work.is_completed() for work in self._held[0][0]):
            self._held.popleft()

    def close(self) -> None:
        self._held.clear()
