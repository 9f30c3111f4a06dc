"""Stamps: marks in time at either end of an action, read once the step is over.

On CPU an action is over when its call returns, so a mark is a reading of the clock. On CUDA a call
only queues work: a mark is an event behind what was queued so far, on the computing stream, which
also waits for messages there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaStamps", "HostStamps", "Stamps", "stamps_for"]

Clock = Callable[[], float]


class Stamps(Protocol):
    """One step's marks."""

    def mark(self) -> Any:
        """Now, in a form that `seconds` reads."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """When the marks were, on the recorder's clock; waits for the device."""

    def seconds_so_far(self, marks: Sequence[Any]) -> list[float | None]:
        """The same without waiting: None for what the device has not come to."""

    def peak_allocated_bytes(self) -> int | None:
        """Most bytes that the device's allocator has given out since the step began."""


def stamps_for(device: torch.device, clock: Clock) -> Stamps:
    """The marks of a step that begins now."""
    return CudaStamps(device, clock) if device.type == "cuda" else HostStamps(clock)


class HostStamps:
    """Readings of the clock."""

    def __init__(self, clock: Clock) -> None:
        self.mark = clock

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """They are seconds."""
        return list(marks)

    def seconds_so_far(self, marks: Sequence[float]) -> list[float | None]:
        """As `seconds`."""
        return list(marks)

    def peak_allocated_bytes(self) -> int | None:
        """The heap keeps no such figure."""
        return None


class CudaStamps:
    """Events on the computing stream, counted from one whose time is known on the host."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._device = device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._first, self._first_s = self.mark(), clock()

    def mark(self) -> torch.cuda.Event:
        """An event behind what has been queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Waits for the device."""
        torch.cuda.synchronize(self._device)
        return [self._seconds(mark) for mark in marks]

    def seconds_so_far(self, marks: Sequence[torch.cuda.Event]) -> list[float | None]:
        """Asks each event whether the device has come to it."""
        return [
            self._seconds(mark) if mark.query() else None  # type: ignore[no-untyped-call]
            for mark in marks
        ]

    def _seconds(self, mark: torch.cuda.Event) -> float:
        """Elapsed times are in milliseconds."""
        elapsed_ms: float = self._first.elapsed_time(mark)
        return self._first_s + elapsed_ms / 1e3

    def peak_allocated_bytes(self) -> int | None:
        """Of this process on the device."""
        return torch.cuda.max_memory_allocated(self._device)
