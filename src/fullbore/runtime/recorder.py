"""The recorder: when each action ran, and how many bytes autograd kept for it.

Times are marked at either end of an action (`stamps`) and stored as they are; they become a
`Timeline` after the step, on one clock for all ranks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fullbore.ir import Action, Kind
from fullbore.runtime.control import Control
from fullbore.runtime.host import Copy
from fullbore.runtime.sharded import local_part
from fullbore.runtime.stamps import Clock, Stamps
from fullbore.timeline import Timeline

__all__ = ["ActivationMeter", "RankRecord", "SpanLog", "assemble", "clock_offset_s"]

_PINGS = 32


class SpanLog:
    """Spans of one rank in one step, in the order in which they began."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps, self.mark = stamps, stamps.mark
        self._actions: list[Action] = []
        self._starts: list[Any] = []
        self._ends: list[Any] = []
        self._copies: dict[int, Copy] = {}

    def begin(self, action: Action) -> int:
        """Open a span; returns its index."""
        self._actions.append(action)
        start = self.mark()
        self._starts.append(start)
        self._ends.append(start)  # where it never ends
        return len(self._starts) - 1

    def end(self, index: int, copy: Copy | None = None) -> None:
        """Close a span. copy: whose ends are the span's, instead of those of asking for it."""
        self._ends[index] = self.mark()
        if copy is not None:
            self._copies[index] = copy

    def last(self, count: int) -> list[tuple[str, float | None, float | None]]:
        """The newest spans: action, begin and end (None: not yet); from any thread."""
        actions, starts, ends = (
            kept[-count:] for kept in (self._actions, self._starts, self._ends)
        )
        begun_s, ended_s = self._stamps.seconds_so_far(starts), self._stamps.seconds_so_far(ends)
        return [
            (str(action), begin_s, None if start is end else end_s)
            for action, start, end, begin_s, end_s in zip(
                actions, starts, ends, begun_s, ended_s, strict=False
            )
        ]

    def record(
        self, *, offset_s: float, meter: ActivationMeter, boundary_messages: int
    ) -> RankRecord:
        """What this rank tells the others after the step; open spans end where they began."""
        for index, copy in self._copies.items():
            copy.wait()
            self._starts[index], self._ends[index] = copy.start, copy.end
        return RankRecord(
            kind=np.array([a.kind for a in self._actions], dtype=np.int8),
            stage=np.array([a.stage for a in self._actions], dtype=np.int32),
            microbatch=np.array([a.microbatch for a in self._actions], dtype=np.int32),
            start_s=np.array(self._stamps.seconds(self._starts)) + offset_s,
            end_s=np.array(self._stamps.seconds(self._ends)) + offset_s,
            peak_bytes=meter.peak_bytes,
            stage_bytes=meter.stage_bytes.by_stage(),
            held_bytes=meter.held_bytes.by_stage(),
            input_bytes=meter.input_bytes.by_stage(),
            offload_bytes=meter.offload_bytes.by_stage(),
            boundary_messages=boundary_messages,
            allocated_bytes=self._stamps.peak_allocated_bytes(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRecord:
    """One rank's step: arrays [n] of spans, on the clock of rank 0.

    stage_bytes: of each stage here, most bytes that autograd kept for one microbatch.
    held_bytes: of each stage here whose backward is split, most bytes of one between I and W.
    input_bytes: of each stage here that recomputes, most bytes of one before it does.
    offload_bytes: of each stage here that offloads, most bytes of one that leave.
    allocated_bytes: most that the device's allocator had given out, on CUDA.
    """

    kind: np.ndarray[Any, np.dtype[np.int8]]
    stage: np.ndarray[Any, np.dtype[np.int32]]
    microbatch: np.ndarray[Any, np.dtype[np.int32]]
    start_s: np.ndarray[Any, np.dtype[np.float64]]
    end_s: np.ndarray[Any, np.dtype[np.float64]]
    peak_bytes: int
    stage_bytes: dict[int, int]
    held_bytes: dict[int, int]
    input_bytes: dict[int, int]
    offload_bytes: dict[int, int]
    boundary_messages: int
    allocated_bytes: int | None


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
        tensor = torch.zeros(1, dtype=torch.float64, device="cpu")
        control.receive(peer, tensor)
        tensor[0] = clock()
        control.send(peer, tensor)


def _ping(control: Control, clock: Clock) -> float:
    best_s, offset_s = float("inf"), 0.0
    for _ in range(_PINGS):
        tensor = torch.zeros(1, dtype=torch.float64, device="cpu")
        sent_s = clock()
        control.send(0, tensor)
        control.receive(0, tensor)
        round_trip_s = clock() - sent_s
        if round_trip_s < best_s:
            best_s, offset_s = round_trip_s, float(tensor[0]) - (sent_s + round_trip_s / 2)
    return offset_s


class ActivationMeter:
    """Counts the bytes that autograd saves for backward and a backward frees, and between the
    halves of a split one those of the inputs and gradients that wait for W. What an OFFLOAD moves
    does not count until its RELOAD, by the order of the program: a copy under way is taken to be
    over (`timeline.live_curves` counts it by the measured times).

    Parameters, buffers and the caller's own inputs stay whatever happens and do not count. A
    storage that several saved tensors of one microbatch share counts once. Looking at every saved
    tensor of every microbatch would cost over 1 % of a step, so each is weighed when a microbatch
    of its shapes comes for the first time, and then one of the M in turn, a step each: the others
    are taken to weigh what they weighed last.
    """

    def __init__(self, modules: Sequence[nn.Module], *, microbatches: int, slices: int = 1) -> None:
        """slices: how many of what the schedule calls microbatches make one."""
        self._modules, self._microbatches, self._slices = modules, microbatches, slices
        self._staying: set[int] = set()  # addresses of storages
        self._weights: dict[_Weighed, int] = {}  # as last weighed
        self._held_weights: dict[_Weighed, int] = {}
        self._restored_weights: dict[_Weighed, int] = {}
        self._turn = -1
        self.begin(None)  # a first step weighs all, since it changes what decides

    def forget(self) -> None:
        """Weigh everything anew: what decides it has changed, or a step has failed."""
        self._weights.clear()
        self._held_weights.clear()
        self._restored_weights.clear()
        self._staying = _addresses(
            t for m in self._modules for t in (*m.parameters(), *m.buffers())
        )

    def begin(self, inputs: Any) -> None:
        """A step begins; inputs: any nest of the caller's tensors."""
        self._turn = (self._turn + 1) % self._microbatches
        leaves = (t for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor))
        self._given = _addresses(leaves)
        self._saved_bytes: dict[tuple[int, int], int] = {}
        self._bases: dict[tuple[int, int], _Base] = {}  # of those that will be recomputed
        self._live_bytes = 0
        self.peak_bytes = 0
        self.stage_bytes = _Most(self._slices)
        self.held_bytes = _Most(self._slices)  # between I and W
        self.input_bytes = _Most(self._slices)  # before a recomputation
        self.offload_bytes = _Most(self._slices)  # that leave

    @contextmanager
    def forward(
        self, stage: int, microbatch: int, signature: int, kept: Kept, *, recomputes: bool
    ) -> Iterator[None]:
        """Around a forward: everything saved inside belongs to (stage, microbatch).

        signature: which shapes the microbatch has. kept: gives what is kept beside that.
        recomputes: some of it to be recomputed from.
        """
        key = (stage, microbatch, signature)
        storages: dict[int, int] = {}
        if key in self._weights and microbatch != self._turn:
            yield
        else:
            with torch.autograd.graph.saved_tensors_hooks(partial(_pack, storages), _unpack):
                yield
            storages |= _storages(kept(microbatch))
            self._weights[key] = self._sum(storages)
        self._set(stage, microbatch, self._weights[key])
        self.stage_bytes.see(stage, microbatch, self._weights[key])
        if recomputes:
            self._bases[stage, microbatch] = _Base(key=key, storages=storages)
            self.input_bytes.see(stage, microbatch, self._weights[key])

    def restored(self, stage: int, microbatch: int, tensors: Iterable[torch.Tensor]) -> None:
        """Recomputation brought these back; what it brought back before them is gone."""
        base = self._bases.get((stage, microbatch))
        if base is None:
            return  # an evaluation, or a step that failed
        if base.storages or base.key not in self._restored_weights:
            now = self._sum(base.storages | _storages(tensors))
            before = self._restored_weights.get(base.key, 0) if base.is_restored else 0
            self._restored_weights[base.key] = max(now, before)
            base.is_restored = True
        else:
            now = self._restored_weights[base.key]
        self._set(stage, microbatch, now)
        self.stage_bytes.see(stage, microbatch, now)

    def left(self, stage: int, microbatch: int, size: int) -> None:
        """So many bytes of (stage, microbatch) have begun to leave for the host."""
        self._set(stage, microbatch, self._saved_bytes.get((stage, microbatch), 0) - size)
        self.offload_bytes.see(stage, microbatch, size)
        base = self._bases.get((stage, microbatch))
        if base is not None:  # their addresses are others' now
            sizes = [s for a, s in base.storages.items() if a not in self._staying | self._given]
            base.storages = {-1 - i: size for i, size in enumerate(sizes)}

    def returned(self, stage: int, microbatch: int, size: int) -> None:
        """They have begun to come back."""
        self._set(stage, microbatch, self._saved_bytes.get((stage, microbatch), 0) + size)

    def freed(self, stage: int, microbatch: int) -> None:
        """The backward of (stage, microbatch) is done."""
        self._live_bytes -= self._saved_bytes.pop((stage, microbatch), 0)

    def halved(
        self, stage: int, microbatch: int, signature: int, waiting: Iterable[torch.Tensor]
    ) -> None:
        """The I of (stage, microbatch) is done, and these tensors wait for its W."""
        key = (stage, microbatch, signature)
        if key not in self._held_weights or microbatch == self._turn:
            self._held_weights[key] = self._sum(_storages(waiting))
        held = self._held_weights[key]
        self._set(stage, microbatch, held)
        self.held_bytes.see(stage, microbatch, held)

    def _sum(self, storages: Mapping[int, int]) -> int:
        staying = self._staying | self._given
        return sum(size for address, size in storages.items() if address not in staying)

    def _set(self, stage: int, microbatch: int, size: int) -> None:
        """What (stage, microbatch) holds from now on."""
        self._live_bytes += size - self._saved_bytes.get((stage, microbatch), 0)
        self._saved_bytes[stage, microbatch] = size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)


class _Most:
    """The most bytes of one microbatch, by stage; of one in slices, of all its slices together."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._most: dict[tuple[int, int], int] = {}  # of each stage and slice

    def see(self, stage: int, microbatch: int, size: int) -> None:
        """So much it was at a time."""
        self._most[stage, microbatch] = max(size, self._most.get((stage, microbatch), 0))

    def by_stage(self) -> dict[int, int]:
        """Of each stage that was seen."""
        sums: dict[tuple[int, int], int] = {}
        for (stage, microbatch), size in self._most.items():
            whole = stage, microbatch // self._slices
            sums[whole] = sums.get(whole, 0) + size
        most: dict[int, int] = {}
        for (stage, _), size in sums.items():
            most[stage] = max(size, most.get(stage, 0))
        return most


_Weighed = tuple[int, int, int]  # stage, microbatch, number of its signature
Kept = Callable[[int], Iterable[torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class _Base:
    """A forward that will be recomputed. storages: bytes by address, where it was weighed."""

    key: _Weighed
    storages: dict[int, int]
    is_restored: bool = False


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by address; sparse tensors have no one storage, zeros of a derivative taken forwards
    none at all, and neither count.
    """
    found = (tensor.untyped_storage() for tensor in tensors if _has_storage(tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor._is_zerotensor()


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {local_part(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _pack(storages: dict[int, int], tensor: torch.Tensor) -> torch.Tensor:
    storages |= _storages([tensor])
    return tensor.detach()  # a saved output must not hold its own graph


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
