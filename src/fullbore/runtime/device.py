"""What differs between CPU and CUDA: process groups, waiting, and keeping what is being sent.

On CPU (gloo) a host thread waits for a message. On CUDA (NCCL) the computing stream waits and
the host goes on; communication is issued from streams of its own, since NCCL makes an operation
wait for everything issued before it on the current stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store

from fullbore.runtime.keeper import CausalKeeper, Keeper, PollingKeeper

__all__ = ["CpuSide", "CudaSide", "Group", "Side", "device_of", "side_of"]


class Group(Protocol):
    """What this package uses of gloo's and NCCL's own process groups."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int, /) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int, /) -> dist.Work: ...
    def broadcast(self, tensors: list[torch.Tensor], options: Any, /) -> dist.Work: ...
    def allreduce(self, tensors: list[torch.Tensor], /) -> dist.Work: ...
    def abort(self) -> None: ...


_TAG_NEVER_SENT = 1
_ABORT_WAIT = timedelta(milliseconds=1)


class Side(Protocol):
    """One kind of device, as the links see it."""

    device: torch.device

    def make_group(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> Group: ...
    def keeper(self) -> Keeper: ...
    def sending(self) -> AbstractContextManager[object]: ...
    def receiving(self) -> AbstractContextManager[object]: ...
    def received(self, tensors: Sequence[torch.Tensor | None]) -> None: ...
    def abort(self, group: Group) -> None: ...


def device_of(stages: Mapping[int, nn.Module]) -> torch.device:
    """Where the weights of some stages are; the CPU where there are none."""
    parameters = (p for module in stages.values() for p in module.parameters())
    return next((p.device for p in parameters), torch.device("cpu"))


def side_of(device: torch.device) -> Side:
    """The side for a device."""
    return CudaSide(device) if device.type == "cuda" else CpuSide()


class CpuSide:
    """Gloo: the host waits; groups of one rank share a network thread."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._options: Any = None

    def make_group(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> Group:
        """Connect a gloo group; every member must call."""
        if self._options is None:
            first = dist.ProcessGroupGloo(store, rank, size, timeout)
            self._options = first.options
            return cast(Group, first)
        return cast(Group, dist.ProcessGroupGloo(store, rank, size, self._options))

    def keeper(self) -> Keeper:
        """Gloo's operations can be waited for, but not polled."""
        return CausalKeeper()

    def sending(self) -> AbstractContextManager[object]:
        """Sends need nothing around them."""
        return nullcontext()

    def receiving(self) -> AbstractContextManager[object]:
        """Receives need nothing around them."""
        return nullcontext()

    def received(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """The host has waited: nothing to do."""

    def abort(self, group: Group) -> None:
        """Close a group at once, also while other threads wait in it; its peers notice.

        Gloo has no call for that, but an operation that runs out of time closes every connection
        of its group, so one that cannot succeed is given a millisecond. Where the connection to
        a peer is closed already it fails at once and closes nothing, so every peer is tried.
        """
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):  # the point of it
                    group.recv([torch.empty(1)], peer, _TAG_NEVER_SENT).wait(_ABORT_WAIT)


class CudaSide:
    """NCCL: streams wait, the host does not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._send_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._receive_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def make_group(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> Group:
        """Connect an NCCL communicator now, in the same order on every rank."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(self.device)
        return cast(Group, group)

    def keeper(self) -> Keeper:
        """NCCL's operations can be polled."""
        return PollingKeeper()

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

    def abort(self, group: Group) -> None:
        """Abort the communicator."""
        group.abort()
