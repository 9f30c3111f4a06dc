"""What differs between CPU and CUDA: process groups, waiting, and keeping what is being sent.

On CPU (gloo) a host thread waits for a message. On CUDA (NCCL) the computing stream waits and
the host goes on; communication is issued from streams of its own, since NCCL makes an operation
wait for everything issued before it on the current stream.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["CpuSide", "CudaSide", "Group", "Keeper", "Side", "side_of"]

Group = dist.distributed_c10d.Backend  # gloo's or NCCL's own process group
_TAG_NEVER_SENT = 1
_ABORT_WAIT = timedelta(milliseconds=1)


class Keeper(Protocol):
    """Holds sent tensors until their sends have completed, never longer."""

    def keep(
        self,
        works: list[dist.Work],
        tensors: list[torch.Tensor],
        on_sent: Callable[[], None] | None,
    ) -> None:
        """Hold the tensors of one message; on_sent is called when it has left (CPU only)."""

    def close(self) -> None:
        """No more messages."""


class Side(Protocol):
    """One kind of device, as the links see it."""

    device: torch.device

    def make_group(
        self, store: dist.Store, *, rank: int, size: int, timeout: timedelta
    ) -> Group: ...
    def keeper(self, name: str) -> Keeper: ...
    def sending(self) -> AbstractContextManager[object]: ...
    def receiving(self) -> AbstractContextManager[object]: ...
    def received(self, tensors: Sequence[torch.Tensor | None]) -> None: ...
    def abort(self, group: Group, *, peer: int) -> None: ...


def side_of(device: torch.device) -> Side:
    """The side for a device."""
    return CudaSide(device) if device.type == "cuda" else CpuSide()


class CpuSide:
    """Gloo: the host waits; groups of one rank share a network thread."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._options: dist.ProcessGroupGloo._Options | None = None

    def make_group(
        self, store: dist.Store, *, rank: int, size: int, timeout: timedelta
    ) -> Group:
        """Connect a gloo group; every member must call."""
        if self._options is None:
            first = dist.ProcessGroupGloo(store, rank, size, timeout)
            self._options = first.options
            return first
        return dist.ProcessGroupGloo(store, rank, size, self._options)

    def keeper(self, name: str) -> Keeper:
        """A thread: gloo's operations can be waited for, but not polled."""
        return _ThreadKeeper(name)

    def sending(self) -> AbstractContextManager[object]:
        """Sends need nothing around them."""
        return nullcontext()

    def receiving(self) -> AbstractContextManager[object]:
        """Receives need nothing around them."""
        return nullcontext()

    def received(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """The host has waited: nothing to do."""

    def abort(self, group: Group, *, peer: int) -> None:
        """Close a group at once, also while other threads wait in it; its peers notice.

        Gloo has no call for that, but an operation that runs out of time closes every connection
        of its group, so one that cannot succeed is given a millisecond.
        """
        try:
            group.recv([torch.empty(1)], peer, _TAG_NEVER_SENT).wait(_ABORT_WAIT)
        except RuntimeError:
            pass  # the point of it, or the group was closed already


_Kept = tuple[list[dist.Work], list[torch.Tensor], Callable[[], None] | None]


class _ThreadKeeper:
    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Kept | None] = queue.SimpleQueue()
        threading.Thread(target=_hold, args=(self._queue,), name=name, daemon=True).start()

    def keep(
        self,
        works: list[dist.Work],
        tensors: list[torch.Tensor],
        on_sent: Callable[[], None] | None,
    ) -> None:
        self._queue.put((works, tensors, on_sent))

    def close(self) -> None:
        self._queue.put(None)


def _hold(kept: queue.SimpleQueue[_Kept | None]) -> None:
    while _hold_one(kept.get()):
        pass


def _hold_one(message: _Kept | None) -> bool:
    """Wait until one message has left; its tensors are let go with this function's frame."""
    if message is None:
        return False
    works, _, on_sent = message
    try:
        for work in works:
            work.wait()
    except RuntimeError:
        return True  # the peer is gone: this rank finds out where it waits next
    if on_sent:
        on_sent()
    return True


class CudaSide:
    """NCCL: streams wait, the host does not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._send_stream = torch.cuda.Stream(device)
        self._receive_stream = torch.cuda.Stream(device)

    def make_group(
        self, store: dist.Store, *, rank: int, size: int, timeout: timedelta
    ) -> Group:
        """Connect an NCCL communicator now, in the same order on every rank."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(self.device)
        return group

    def keeper(self, name: str) -> Keeper:
        """A list, polled at each send: NCCL's operations can be polled."""
        return _PolledKeeper()

    def sending(self) -> AbstractContextManager[object]:
        """Issue from the send stream, behind what the computing stream has been given so far."""
        self._send_stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._send_stream)

    def receiving(self) -> AbstractContextManager[object]:
        """Issue from the receive stream, which waits for no computation."""
        return torch.cuda.stream(self._receive_stream)

    def received(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Buffers come from the receive stream's pool and are used on the computing stream."""
        stream = torch.cuda.current_stream(self.device)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)

    def abort(self, group: Group, *, peer: int) -> None:
        """Abort the communicator."""
        group.abort()


class _PolledKeeper:
    def __init__(self) -> None:
        self._kept: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()

    def keep(
        self,
        works: list[dist.Work],
        tensors: list[torch.Tensor],
        on_sent: Callable[[], None] | None,
    ) -> None:
        self._kept.append((works, tensors))
        while self._kept and all(work.is_completed() for work in self._kept[0][0]):
            self._kept.popleft()

    def close(self) -> None:
        self._kept.clear()
