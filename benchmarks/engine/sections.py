"""Where the microseconds of an action go: processor and wall time of each kind of action.

Paced stages, so that what is left is the engine's; every second line is the processor time that
the process's other threads take (gloo's network thread). The two clock readings around an action
cost some microseconds themselves: use it to see what is large, and `paced` to compare engines.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import paced
import pool
import torch.distributed as dist

from fullbore.ir import Kind
from fullbore.runtime.executor import Executor

SUMMARY = "processor and wall time of each kind of action"


@dataclass(slots=True)
class Sum:
    """Of one kind of action."""

    count: int = 0
    processor_ns: int = 0
    wall_ns: int = 0


def measure(rank: int, setting: paced.Setting) -> list[dict[str, Any]]:
    """Rows of one rank."""
    rows = []
    for name in setting.names:
        sums: dict[Kind, Sum] = {}

        def carry_out(self: Executor, start: int, stop: int, sums: Any = sums) -> None:
            for index in range(start, stop):
                self.at = index
                processor_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
                self._operations[index]()
                one = sums.setdefault(self.actions[index].kind, Sum())
                one.count += 1
                one.processor_ns += time.thread_time_ns() - processor_ns
                one.wall_ns += time.perf_counter_ns() - wall_ns

        with mock.patch.object(Executor, "_carry_out", carry_out):
            step = paced.fullbore_step(setting.schedule(name), setting, rank)
            for _ in range(2):
                step()
            sums.clear()
            dist.barrier()
            main_s, all_s = time.thread_time(), time.process_time()
            for _ in range(setting.steps):
                step()
            main_s, all_s = time.thread_time() - main_s, time.process_time() - all_s
        actions = sum(one.count for kind, one in sums.items() if kind < Kind.SEND_F)
        rows += [
            {
                "schedule": name,
                "what": kind.name,
                "count": one.count // setting.steps,
                "processor_us": one.processor_ns / one.count / 1e3,
                "wall_us": one.wall_ns / one.count / 1e3,
            }
            for kind, one in sorted(sums.items())
        ]
        for what, seconds in (("step / computes", main_s), ("other threads", all_s - main_s)):
            rows.append(
                {
                    "schedule": name,
                    "what": what,
                    "count": actions // setting.steps,
                    "processor_us": seconds / actions * 1e6,
                    "wall_us": None,
                }
            )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("-p", "--ranks", type=int, default=8)
    parser.add_argument("-m", "--microbatches", type=int, default=16)
    parser.add_argument("--message-kib", type=int, default=64)
    parser.add_argument("--forward-ms", type=float, default=10.0, help="a rank and microbatch")
    parser.add_argument("--backward-ms", type=float, default=20.0, help="a rank and microbatch")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved"])


def main(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run and print what a rank in the middle of the pipeline measured."""
    setting = paced.Setting(
        ranks=given.ranks,
        microbatches=given.microbatches,
        forward_s=given.forward_ms / 1e3,
        backward_s=given.backward_ms / 1e3,
        message_bytes=given.message_kib * 1024,
        steps=given.steps,
        rounds=1,
        names=tuple(given.schedules),
    )
    rows: list[dict[str, Any]] = pool.run(given.ranks, measure, setting)[given.ranks // 2]
    print("schedule     what             a step  processor        wall")
    for row in rows:
        wall = "" if row["wall_us"] is None else f"{row['wall_us']:8.0f} us"
        print(
            f"{row['schedule']:12} {row['what']:16} {row['count']:6} "
            f"{row['processor_us']:7.0f} us {wall}"
        )
    return rows
