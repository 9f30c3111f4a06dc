"""What recording a step costs: the same steps with the recorder on and off, in turn.

    python benchmarks/recorder/recorder.py [--help]

Goal: under 1 % of the step. Two ranks train blocks of linear layers with real arithmetic, one
core each; pairs of steps alternate, and the median of the pairs' ratios is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from fullbore import schedules
from fullbore.runtime import Pipeline
from fullbore.train.launch import end_with_parent


class Block(nn.Module):
    """A residual block as a transformer's feed-forward half has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, width] -> [rows, width]."""
        hidden: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


def run_rank(rank: int, given: argparse.Namespace, store: str, result: str) -> None:
    """One process: both pipelines over the same modules, in turn."""
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    schedule = schedules.one_f_one_b(ranks=2, microbatches=given.microbatches)
    stage = nn.Sequential(*(Block(given.width) for _ in range(given.blocks)))
    x = torch.randn(given.microbatches * given.rows, given.width)
    pipes = {
        record: Pipeline({rank: stage}, schedule, nn.functional.mse_loss, record=record)
        for record in (False, True)
    }
    times: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(given.pairs + 2):
        for record in (False, True) if pair % 2 else (True, False):
            dist.barrier()
            begun_s = time.perf_counter()
            pipes[record].step(x, x)
            dist.barrier()
            times[record].append(time.perf_counter() - begun_s)
    ratios = [on / off for off, on in list(zip(times[False], times[True], strict=True))[2:]]
    if rank == 0:
        found = {"ratio": statistics.median(ratios), "step_s": statistics.median(times[False])}
        with open(result, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    os._exit(0)  # without the groups' slow farewell


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=128, help="rows (tokens) a microbatch")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--blocks", type=int, default=3, help="blocks a rank")
    parser.add_argument("--pairs", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, result = os.path.join(folder, "store"), os.path.join(folder, "result.json")
        torch.multiprocessing.spawn(run_rank, args=(given, store, result), nprocs=2)
        with open(result, encoding="utf-8") as file:
            found = json.load(file)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    )
    print(
        f"a step of {1e3 * found['step_s']:.0f} ms takes {found['ratio'] - 1:+.2%} with the "
        f"recorder on (median of {given.pairs} pairs)"
    )


if __name__ == "__main__":
    main()
