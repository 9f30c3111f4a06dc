"""What a sampling profiler sees: py-spy looks on, 250 times a second, while a rank steps.

It counts a sample where the rank's main thread is on a processor, so sleeps and waits take no part.
Samples go to the innermost function that is ours, torch's or the stage's, by kind of action. Needs
`pip install py-spy` and the right to trace a process of one's own (Linux: root, or ptrace_scope 0).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import paced
import pool
import torch
import torch.distributed as dist

SUMMARY = "where py-spy finds a rank at work"

_LOOP = "Executor._carry_out "  # the engine's loop over its actions, as py-spy names the frame


def measure(rank: int, setting: paced.Setting) -> str:
    """All samples of the rank in the middle, one stack and its number a line; "" of others."""
    step = paced.fullbore_step(setting.schedule(setting.names[0]), setting, rank)
    for _ in range(4):
        step()
    looked_at = rank == setting.ranks // 2
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples"
        spy = _look_on(file) if looked_at else None
        while _any(int(spy is not None and spy.poll() is None)):
            step()
        return file.read_text() if looked_at else ""


def _look_on(file: Path) -> subprocess.Popen[bytes]:
    command = ["py-spy", "record", "--pid", str(os.getpid()), "--duration", "30", "--rate", "250"]
    return subprocess.Popen(
        [*command, "--format", "raw", "--output", str(file)], stdout=subprocess.DEVNULL
    )


def _any(here: int) -> bool:
    """Whether it is not 0 on some rank."""
    there = torch.tensor(here)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    return bool(there)


def counted(samples: str) -> Counter[tuple[str, str]]:
    """Samples by action and innermost function; those outside of the loop as "step"."""
    found: Counter[tuple[str, str]] = Counter()
    for line in samples.splitlines():
        stack, number = line.rsplit(" ", 1)
        frames = stack.split(";")
        if not any("fullbore_step" in frame for frame in frames):
            continue
        at = next((i for i, frame in enumerate(frames) if frame.startswith(_LOOP)), None)
        inside = frames[at + 1 :] if at is not None else []
        action = inside[0].split(" ")[0] if inside else "the loop" if at is not None else "the step"
        found[action, frames[-1].split(":")[0].rstrip(")") + ")"] += int(number)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("-p", "--ranks", type=int, default=8)
    parser.add_argument("-m", "--microbatches", type=int, default=16)
    parser.add_argument("--message-kib", type=int, default=64)
    parser.add_argument("--schedule", default="1f1b")


def main(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run and print the shares of one percent and more."""
    if shutil.which("py-spy") is None:
        raise SystemExit("py-spy is not installed: pip install py-spy")
    setting = paced.Setting(
        ranks=given.ranks,
        microbatches=given.microbatches,
        forward_s=0.010,
        backward_s=0.020,
        message_bytes=given.message_kib * 1024,
        steps=1,
        rounds=1,
        names=(given.schedule,),
    )
    found = counted(pool.run(given.ranks, measure, setting)[given.ranks // 2])
    total = sum(found.values())
    rows = [
        {"action": action, "function": function, "share": number / total}
        for (action, function), number in found.most_common()
    ]
    print(f"{total} samples\n\nshare  in                         innermost function")
    for row in rows:
        if row["share"] >= 0.01:
            print(f"{row['share']:5.1%}  {row['action']:25}  {row['function']}")
    return rows
