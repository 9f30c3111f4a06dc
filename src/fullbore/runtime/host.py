"""The host's side of offloading: where storages go, and the copies there and back.

Copies run beside the rank's computation, one after the other in the order in which it asked for
them. On CPU they go to a file (`file_host`), on CUDA to pinned memory (`pinned_host`). In their
order lies also why a buffer may be used again as soon as its way back has been asked for: whatever
is copied into it next comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

import torch

__all__ = ["Away", "Copy", "Host", "Mark", "Pool", "Storages", "bytes_of", "offsets_of"]

Mark = Callable[[], Any]
Storages = Sequence[torch.UntypedStorage]
_ALIGNED_BYTES = 64


class Copy(Protocol):
    """A copy under way. start, end: marks at its ends, where they were asked for; final once it
    has been waited for. storages: what came back.
    """

    start: Any
    end: Any
    storages: Storages

    def wait(self) -> None:
        """From here on what came back can be used, and marks can be read."""


class Away(Protocol):
    """Storages on the host."""

    @property
    def copy(self) -> Copy: ...


AnyAway = TypeVar("AnyAway", bound=Away)


class Host(Protocol[AnyAway]):
    """Takes storages and gives them back."""

    def put(self, storages: Storages, mark: Mark | None) -> AnyAway:
        """Begin to copy them there; they must not change any more."""

    def get(self, away: AnyAway, mark: Mark | None) -> Copy:
        """Begin to copy them back into new storages, in their order; once."""

    def reset(self) -> None:
        """Nothing is there any more."""

    def close(self) -> None:
        """Let go of everything."""


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes, for the time of a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Where each of some pieces begins in a buffer, and where the last one ends."""
    padded = (size + -size % _ALIGNED_BYTES for size in sizes)
    return list(accumulate(padded, initial=0))


class Sized(Protocol):
    @property
    def size(self) -> int: ...


Buffer = TypeVar("Buffer", bound=Sized)


class Pool(Generic[Buffer]):
    """Buffers that are used again, so that there are as many as were out at once.

    make: a new one of so many bytes; start_over: called when all there were are forgotten, which
    happens where none is out and none fits, since sizes have changed.
    """

    def __init__(
        self, make: Callable[[int], Buffer], start_over: Callable[[], None] = lambda: None
    ) -> None:
        self._make, self._start_over = make, start_over
        self._free: list[Buffer] = []
        self.out = self.made = 0

    def take(self, size: int) -> Buffer:
        """The smallest free one that holds `size` bytes, or a new one."""
        fitting = [buffer for buffer in self._free if buffer.size >= size]
        if not fitting and self.out == 0:
            self.reset()
        self.out += 1
        if not fitting:
            self.made += 1
            return self._make(size)
        found = min(fitting, key=lambda buffer: buffer.size)
        self._free = [buffer for buffer in self._free if buffer is not found]
        return found

    def give_back(self, buffer: Buffer) -> None:
        """It is free again."""
        self.out -= 1
        self._free.append(buffer)

    def reset(self) -> None:
        """Forget all of them."""
        self._free.clear()
        self.out = self.made = 0
        self._start_over()
