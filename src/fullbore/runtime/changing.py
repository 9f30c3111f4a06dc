"""Buffers that a forward changes, such as running statistics, where a forward runs twice.

The second run must begin with what the first one began with, or it computes something else, and
must leave nothing behind, or everything is counted twice. Modules say nothing about this, so their
buffers are watched: one that is replaced, or changed in place, makes its owner one that changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["ChangingBuffers"]

_Buffers = Mapping[str, Tensor | None]


class ChangingBuffers:
    """Those of a module that is run again, and of all within it."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = [part for part in module.modules() if part._buffers]
        self._changing: set[nn.Module] | None = None  # not known before a forward has shown it

    @contextmanager
    def first_run(self) -> Iterator[BuffersBefore]:
        """Around a forward that will be repeated."""
        before, known = BuffersBefore(), self._changing
        copied = self._owners if known is None else known
        kept = {owner: _copied(owner._buffers) for owner in copied}
        seen = [(owner, _versions(owner)) for owner in self._owners]
        yield before
        changed = {owner for owner, versions in seen if versions != _versions(owner)}
        # an owner that has just begun to change has no copy: it starts from what it has by then
        before.of_owners = {owner: kept.get(owner) for owner in changed}
        self._changing = changed if known is None else known | changed


class BuffersBefore:
    """What buffers were before a forward, of the modules where it changed any.

    Of all buffers of a module, since torch's batch norm changes some without a trace.
    """

    def __init__(self) -> None:
        self.of_owners: dict[nn.Module, _Buffers | None] = {}

    @contextmanager
    def again(self) -> Iterator[None]:
        """As they were then, and afterwards as they are now."""
        now = {owner: dict(owner._buffers) for owner in self.of_owners}
        for owner, before in self.of_owners.items():
            owner._buffers.update(_copied(owner._buffers if before is None else before))
        try:
            yield
        finally:
            for owner, buffers in now.items():
                owner._buffers.update(buffers)


def _copied(buffers: _Buffers) -> dict[str, Tensor | None]:
    return {
        name: None if buffer is None else buffer.detach().clone()
        for name, buffer in buffers.items()
    }


def _versions(owner: nn.Module) -> list[tuple[int, int]]:
    return [(id(b), b._version) for b in owner._buffers.values() if b is not None]
