"""The recorder: when each action ran, and how many bytes autograd kept for it.

Times are taken with one clock reading at either end of an action and stored as they are; they
become a `Timeline` after the step, on one clock for all ranks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fullbore.ir import Action, Kind
from fullbore.runtime.control import Control
from fullbore.timeline import Timeline

__all__ = ["ActivationMeter", "Clock", "RankRecord", "SpanLog", "assemble", "clock_offset_s"]

Clock = Callable[[], float]
_PINGS = 32


class SpanLog:
    """Spans of one rank in one step, in the order in which they began."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._actions: list[Action] = []
        self._starts_s: list[float] = []
        self._ends_s: list[float] = []

    def begin(self, action: Action) -> int:
        """Open a span; returns its index."""
        self._actions.append(action)
        self._ends_s.append(float("nan"))
        self._starts_s.append(self.clock())
        return len(self._starts_s) - 1

    def end(self, index: int) -> None:
        """Close a span (from any thread)."""
        self._ends_s[index] = self.clock()

    def last(self, count: int) -> list[tuple[str, float, float | None]]:
        """The newest spans: action, begin and end (None: still open)."""
        newest = zip(self._actions[-count:], self._starts_s[-count:], strict=False)
        ends = (None if end != end else end for end in self._ends_s[-count:])
        return [
            (str(action), begin, end) for (action, begin), end in zip(newest, ends, strict=False)
        ]

    def record(
        self, *, offset_s: float, meter: ActivationMeter, boundary_messages: int
    ) -> RankRecord:
        """What this rank tells the others after the step; open spans end where they began."""
        starts = np.array(self._starts_s) + offset_s
        ends = np.array(self._ends_s) + offset_s
        return RankRecord(
            kind=np.array([a.kind for a in self._actions], dtype=np.int8),
            stage=np.array([a.stage for a in self._actions], dtype=np.int32),
            microbatch=np.array([a.microbatch for a in self._actions], dtype=np.int32),
            start_s=starts,
            end_s=np.where(np.isnan(ends), starts, ends),
            peak_bytes=meter.peak_bytes,
            stage_bytes=dict(meter.stage_bytes),
            boundary_messages=boundary_messages,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRecord:
    """One rank's step: arrays [n] of spans, on the clock of rank 0.

    stage_bytes: of each stage here, most bytes that autograd kept for one microbatch.
    """

    kind: np.ndarray[Any, np.dtype[np.int8]]
    stage: np.ndarray[Any, np.dtype[np.int32]]
    microbatch: np.ndarray[Any, np.dtype[np.int32]]
    start_s: np.ndarray[Any, np.dtype[np.float64]]
    end_s: np.ndarray[Any, np.dtype[np.float64]]
    peak_bytes: int
    stage_bytes: dict[int, int]
    boundary_messages: int


def assemble(records: list[RankRecord], *, name: str) -> Timeline:
    """The timeline of all ranks; 0 is where the first compute action of the step began."""
    first_s = min(
        (float(r.start_s[r.kind < Kind.SEND_F].min()) for r in records if len(r.kind)), default=0.0
    )
    return Timeline(
        source="measured",
        name=name,
        ranks=len(records),
        rank=np.repeat(np.arange(len(records), dtype=np.int32), [len(r.kind) for r in records]),
        kind=np.concatenate([r.kind for r in records]),
        stage=np.concatenate([r.stage for r in records]),
        microbatch=np.concatenate([r.microbatch for r in records]),
        start_s=np.concatenate([r.start_s for r in records]) - first_s,
        end_s=np.concatenate([r.end_s for r in records]) - first_s,
    )


def clock_offset_s(control: Control, clock: Clock) -> float:
    """Seconds to add to this rank's clock to get rank 0's; every rank must call.

    0 where all ranks read the same clock (one machine, the default clock), else half the round
    trip of the quickest of some pings: off by at most half of that round trip.
    """
    places = control.gather(_clock_place(clock))
    if len(set(places)) == 1:
        return 0.0
    offset_s = 0.0
    for peer in range(1, control.ranks):
        if control.rank == 0:
            _answer_pings(control, peer, clock)
        elif control.rank == peer:
            offset_s = _ping(control, clock)
    return offset_s


def _clock_place(clock: Clock) -> str:
    """What tells two clocks apart: the boot of the machine for the default one."""
    if clock is not time.perf_counter:
        return f"a clock of process {os.getpid()} on {socket.gethostname()}"
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _answer_pings(control: Control, peer: int, clock: Clock) -> None:
    for _ in range(_PINGS):
        tensor = torch.zeros(1, dtype=torch.float64)
        control.receive(peer, tensor)
        tensor[0] = clock()
        control.send(peer, tensor)


def _ping(control: Control, clock: Clock) -> float:
    best_s, offset_s = float("inf"), 0.0
    for _ in range(_PINGS):
        tensor = torch.zeros(1, dtype=torch.float64)
        sent_s = clock()
        control.send(0, tensor)
        control.receive(0, tensor)
        round_trip_s = clock() - sent_s
        if round_trip_s < best_s:
            best_s, offset_s = round_trip_s, float(tensor[0]) - (sent_s + round_trip_s / 2)
    return offset_s


class ActivationMeter:
    """Counts the bytes that autograd saves for backward and a backward frees.

    Parameters, buffers and the caller's own inputs stay whatever happens and do not count. A
    storage that several saved tensors of one microbatch share counts once.
    """

    def __init__(self, modules: list[nn.Module], inputs: Any) -> None:
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        tensors += [t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor)]
        self._staying = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._saved_bytes: dict[tuple[int, int], int] = {}
        self._live_bytes = 0
        self.peak_bytes = 0
        self.stage_bytes: dict[int, int] = {}  # most of one microbatch, by stage

    @contextmanager
    def forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around a forward: everything saved inside belongs to (stage, microbatch)."""
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._staying:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a saved output must not hold its own graph

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
        saved = sum(storages.values())
        self._saved_bytes[stage, microbatch] = saved
        self._live_bytes += saved
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self.stage_bytes[stage] = max(saved, self.stage_bytes.get(stage, 0))

    def freed(self, stage: int, microbatch: int) -> None:
        """The backward of (stage, microbatch) is done."""
        self._live_bytes -= self._saved_bytes.pop((stage, microbatch), 0)


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
