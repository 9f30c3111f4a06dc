"""Slow links: does communication hide behind computation as far as it can?

Every message is held up on its way: a link carries one after the other at a given bandwidth, and
each arrives a latency later. Stages sleep. The step must take what the simulator says for links
like these with overlap; the blocking variant (--no-overlap-p2p-communication) shows what overlap
bought. Links are made slow by a wrapper around the process groups, in the sending process; nothing
else differs from any other run.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import pool
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.runtime import PacedStage, Pipeline, paced_loss, wake_on_time
from fullbore.runtime.device import CpuSide, Group
from fullbore.runtime.keeper import Keeper
from fullbore.sim import simulate

SUMMARY = "slow links: measured against simulated, with overlap and without"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """Of one direction of one link."""

    latency_s: float
    bytes_per_s: float


class HeldUp:
    """The work of a send that has not left yet."""

    def __init__(self) -> None:
        self._left = threading.Event()
        self._work: dist.Work | None = None

    def leave(self, work: dist.Work) -> None:
        """The real send has been posted."""
        self._work = work
        self._left.set()

    def wait(self) -> None:
        """Until it has left."""
        self._left.wait()
        assert self._work is not None
        self._work.wait()


class SlowGroup:
    """A process group whose sends leave late."""

    def __init__(self, inner: Group, slowness: Slowness) -> None:
        self._inner, self._slowness = inner, slowness
        self._waiting: queue.SimpleQueue[tuple[float, list[torch.Tensor], int, int, HeldUp]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._deliver, daemon=True).start()
        self.rank, self.size, self.recv = inner.rank, inner.size, inner.recv
        self.allreduce, self.broadcast, self.abort = inner.allreduce, inner.broadcast, inner.abort

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> HeldUp:
        """Post a send that leaves later."""
        work = HeldUp()
        self._waiting.put((time.perf_counter(), tensors, dst_rank, tag, work))
        return work

    def _deliver(self) -> None:
        wake_on_time()
        free_s = 0.0
        while True:
            sent_s, tensors, *to, work = self._waiting.get()
            size = sum(tensor.nbytes for tensor in tensors)
            free_s = max(sent_s, free_s) + size / self._slowness.bytes_per_s
            remaining_s = free_s + self._slowness.latency_s - time.perf_counter()
            if remaining_s > 0:
                time.sleep(remaining_s)
            work.leave(self._inner.send(tensors, *to))


class SlowSide:
    """The CPU with slow links."""

    def __init__(self, slowness: Slowness) -> None:
        self._inner, self._slowness = CpuSide(), slowness
        self.device = self._inner.device

    def make_group(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> Any:
        """As CpuSide, slower."""
        group = self._inner.make_group(store, rank=rank, size=size, timeout=timeout)
        return SlowGroup(group, self._slowness)

    def keeper(self) -> Keeper:
        """As CpuSide."""
        return self._inner.keeper()

    def sending(self) -> AbstractContextManager[object]:
        """As CpuSide."""
        return self._inner.sending()

    def receiving(self) -> AbstractContextManager[object]:
        """As CpuSide."""
        return self._inner.receiving()

    def received(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """As CpuSide."""

    def abort(self, group: Group) -> None:
        """Never in a benchmark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One job; hops: of each, its share of a forward, half of it latency and half transfer."""

    ranks: int
    microbatches: int
    forward_s: float
    backward_s: float
    message_bytes: int
    hops: tuple[float, ...]
    names: tuple[str, ...]
    steps: int

    def schedule(self, name: str) -> Any:
        """Two virtual stages where it interleaves."""
        return schedules.build(
            name,
            ranks=self.ranks,
            microbatches=self.microbatches,
            virtual_stages=2 if name == "interleaved" else None,
        )

    def costs(self, name: str, hop: float) -> Costs:
        """What the simulator is told."""
        schedule = self.schedule(name)
        v = schedule.virtual_stages
        costs = Costs.uniform(
            stages=schedule.stages, forward_s=self.forward_s / v, backward_s=self.backward_s / v
        )
        if not hop:
            return costs
        slowness = self.slowness(name, hop)
        return costs.model_copy(
            update={
                "hop_s": slowness.latency_s,
                "message_bytes": float(self.message_bytes),
                "bandwidth_bytes_per_s": slowness.bytes_per_s,
            }
        )

    def slowness(self, name: str, hop: float) -> Slowness:
        """Of links on which a hop costs this share of a stage's forward."""
        half_s = hop * self.forward_s / self.schedule(name).virtual_stages / 2
        return Slowness(latency_s=half_s, bytes_per_s=self.message_bytes / half_s)


def measure(rank: int, setting: Setting) -> list[dict[str, Any]]:
    """Step times with each kind of link, with overlap and without."""
    rows = []
    x = torch.zeros(setting.microbatches, setting.message_bytes // 4)
    for name in setting.names:
        schedule = setting.schedule(name)
        for hop in setting.hops:
            side = SlowSide(setting.slowness(name, hop)) if hop else CpuSide()
            row: dict[str, Any] = {"schedule": name, "hop": hop}
            for overlap in (True, False):
                v = schedule.virtual_stages
                stages = {
                    s: PacedStage(
                        forward_s=setting.forward_s / v, backward_s=setting.backward_s / v
                    )
                    for s in schedule.placement.stages_of(rank)
                }
                with mock.patch("fullbore.runtime.pipeline.side_of", lambda _, side=side: side):
                    pipe = Pipeline(stages, schedule, paced_loss, overlap_p2p=overlap)
                times = []
                for _ in range(setting.steps + 2):
                    dist.barrier()
                    times.append(pipe.step(x, x).step_s)
                key = "step_s" if overlap else "blocking_s"
                row[key] = statistics.median(times[2:])
                pipe.close()
            rows.append(row)
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("-p", "--ranks", type=int, default=4)
    parser.add_argument("-m", "--microbatches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=40.0, help="a rank and microbatch")
    parser.add_argument("--backward-ms", type=float, default=80.0, help="a rank and microbatch")
    parser.add_argument("--message-kib", type=int, default=64)
    parser.add_argument("--hops", type=float, nargs="+", default=[0.0, 0.1, 0.25, 0.5])
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved"])
    parser.add_argument("--steps", type=int, default=3)


def main(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run and print."""
    setting = Setting(
        ranks=given.ranks,
        microbatches=given.microbatches,
        forward_s=given.forward_ms / 1e3,
        backward_s=given.backward_ms / 1e3,
        message_bytes=given.message_kib * 1024,
        hops=tuple(given.hops),
        names=tuple(given.schedules),
        steps=given.steps,
    )
    print("schedule     hop, of a forward   simulated  measured           blocking  overlap saves")
    rows = []
    for row in pool.run(given.ranks, measure, setting)[0]:
        costs = setting.costs(row["schedule"], row["hop"])
        schedule = setting.schedule(row["schedule"])
        row["simulated_s"] = float(simulate(schedule, costs).end_s.max())
        row["above"] = row["step_s"] / row["simulated_s"] - 1
        rows.append(row)
        print(
            f"{row['schedule']:12} {row['hop']:17.0%} {row['simulated_s'] * 1e3:9.0f} ms "
            f"{row['step_s'] * 1e3:7.0f} ms {row['above']:+6.1%} {row['blocking_s'] * 1e3:8.0f} ms "
            f"{1 - row['step_s'] / row['blocking_s']:10.1%}"
        )
    return rows
