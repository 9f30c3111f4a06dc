"""Offloading on CUDA: pinned memory takes what leaves, and a stream of its own copies.

The host never waits: streams do.
"""

from __future__ import annotations

from typing import Any

import torch

from fullbore.runtime.host import Mark, Pool, Storages, bytes_of, offsets_of

__all__ = ["PinnedHost"]


class _Pinned:
    """Pinned memory."""

    __slots__ = ("memory", "size")

    def __init__(self, size: int) -> None:
        self.memory, self.size = (
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True),
            size,
        )


class _StreamCopy:
    """A copy on the copy stream; whoever waits makes the computing stream wait, never the host."""

    __slots__ = ("_device", "_event", "end", "start", "storages")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.start: Any = None
        self.end: Any = None
        self.storages: Storages = ()

    def over(self, stream: torch.cuda.Stream) -> None:
        """All of it has been issued."""
        self._event.record(stream)

    def wait(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._event)
        for storage in self.storages:  # made on the copy stream, used and let go on this one
            bytes_of(storage).record_stream(current)


class _InPinned:
    """What is in a pinned buffer, in pieces one behind the other."""

    __slots__ = ("buffer", "copy", "sizes")

    def __init__(self, copy: _StreamCopy, buffer: _Pinned, sizes: list[int]) -> None:
        self.copy, self.buffer, self.sizes = copy, buffer, sizes


class PinnedHost:
    """Pinned memory, and a stream that copies.

    Both ways the copy stream waits for what the computing stream has been given so far: what it
    copies there must have been computed, and what comes back must not take memory before the
    device, which may be far behind the host, has come to that place.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = Pool(_Pinned)

    def put(self, storages: Storages, mark: Mark | None) -> _InPinned:
        """The caller may let go of the storages at once: the allocator waits for the copy."""
        sizes = [storage.nbytes() for storage in storages]
        offsets = offsets_of(sizes)
        away = _InPinned(_StreamCopy(self._device), self._pool.take(offsets[-1]), sizes)
        memory, copy = away.buffer.memory, away.copy
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy.start = mark() if mark is not None else None
            for storage, size, offset in zip(storages, sizes, offsets, strict=False):
                source = bytes_of(storage)
                memory[offset : offset + size].copy_(source, non_blocking=True)
                source.record_stream(self._stream)
            copy.end = mark() if mark is not None else None
            copy.over(self._stream)
        return away

    def get(self, away: _InPinned, mark: Mark | None) -> _StreamCopy:
        """New storages are made on the copy stream."""
        memory, copy, found = away.buffer.memory, _StreamCopy(self._device), []
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy.start = mark() if mark is not None else None
            for size, offset in zip(away.sizes, offsets_of(away.sizes), strict=False):
                target = torch.empty(size, dtype=torch.uint8, device=self._device)
                target.copy_(memory[offset : offset + size], non_blocking=True)
                found.append(target.untyped_storage())
            copy.end = mark() if mark is not None else None
            copy.over(self._stream)
        copy.storages = found
        self._pool.give_back(away.buffer)
        return copy

    def reset(self) -> None:
        """Buffers may still be read: the allocator of pinned memory waits for that."""
        self._pool.reset()

    def close(self) -> None:
        """Let go of all pinned memory."""
        self._pool.reset()
