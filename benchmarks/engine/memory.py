"""Do buffers or the process grow with the number of microbatches?

The same stages under the same schedule with M = 4, 16 and 64: the receives posted at once, and the
resident memory of each rank after some steps, must stay what they are.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pool
import torch
from torch import nn

from fullbore import schedules
from fullbore.runtime import Pipeline

SUMMARY = "boundary buffers and resident memory as M grows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One size: M microbatches of rows x width numbers."""

    ranks: int
    microbatches: tuple[int, ...]
    rows: int
    width: int
    steps: int
    names: tuple[str, ...]


def resident_bytes() -> int:
    """Of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def measure(rank: int, setting: Setting) -> list[dict[str, Any]]:
    """For each schedule and M: receives posted at once, and resident bytes after the steps."""
    rows = []
    for name in setting.names:
        for m in setting.microbatches:
            schedule = schedules.build(
                name,
                ranks=setting.ranks,
                microbatches=m,
                virtual_stages=2 if name == "interleaved" else None,
            )
            stages = {
                s: nn.Sequential(nn.Linear(setting.width, setting.width), nn.GELU())
                for s in schedule.placement.stages_of(rank)
            }
            x = torch.ones(1, setting.width).expand(m * setting.rows, setting.width)
            with Pipeline(stages, schedule, nn.functional.mse_loss, record=True) as pipe:
                for _ in range(setting.steps):
                    result = pipe.step(x, x)
                assert result.boundary_messages is not None
                rows.append(
                    {
                        "schedule": name,
                        "microbatches": m,
                        "posted": max(result.boundary_messages),
                        "resident_bytes": resident_bytes(),
                    }
                )
            del pipe, stages, result
            gc.collect()
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("-p", "--ranks", type=int, default=4)
    parser.add_argument("-m", "--microbatches", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rows", type=int, default=256, help="of a microbatch")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved"])


def main(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run and print; of each figure the largest of all ranks."""
    setting = Setting(
        ranks=given.ranks,
        microbatches=tuple(given.microbatches),
        rows=given.rows,
        width=given.width,
        steps=given.steps,
        names=tuple(given.schedules),
    )
    rows = []
    print(f"messages of {given.rows * given.width * 4 // 1024} KiB, {given.ranks} ranks")
    print("schedule       M  receives posted at once  resident")
    for of_ranks in zip(*pool.run(given.ranks, measure, setting), strict=True):
        row = {**of_ranks[0]}
        for figure in ("posted", "resident_bytes"):
            row[figure] = max(one[figure] for one in of_ranks)
        rows.append(row)
        print(
            f"{row['schedule']:12} {row['microbatches']:3} {row['posted']:12} "
            f"{row['resident_bytes'] / 2**20:18.1f} MiB"
        )
    return rows
