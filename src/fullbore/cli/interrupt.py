"""Ctrl-C as a wish: stop, and keep what there is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["interruptible"]


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C was pressed; a second one is as hard as ever."""
    caught: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _frame: object) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
