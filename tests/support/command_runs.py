"""Runs of `fullbore train` as people start them: processes, what they say, what they write down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from warm import WarmCommand

PATIENCE_S = 75  # a cold start imports transformers on every rank, on a core that may be busy


def flags(folder: Path, **changes: object) -> list[str]:
    values = {
        "model": folder / "model",
        "data": folder / "text.jsonl",
        "data-cache-path": folder / "cache",
        "seq-length": 16,
        "global-batch-size": 4,
        "lr": 0.001,
        "threads": 1,
        "device": "cpu",
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


Process = subprocess.Popen[str] | WarmCommand
FULLBORE = [sys.executable, "-m", "fullbore"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def start(
    command: list[str],
    *,
    env: Mapping[str, str] | None = None,
    cold: bool = False,
    joined: bool = False,
) -> Process:
    """A process in a session of its own.

    cold: a command of fullbore starts as people start it, and not in a tenth of that time from
    an interpreter that has imported all of it. joined: stderr goes into stdout.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
    if command[: len(FULLBORE)] == FULLBORE and not cold:
        return WarmCommand(command[len(FULLBORE) :], env=environment, joined=joined)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if joined else subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )


@contextmanager
def started(
    command: list[str], *, env: Mapping[str, str] | None = None, cold: bool = False
) -> Iterator[Process]:
    """As `start` does it, with stderr in stdout; whatever is left of the process is killed."""
    process = start(command, env=env, cold=cold, joined=True)
    try:
        yield process
    finally:
        family = [process.pid, *(child.pid for child in children(process))]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def children(process: Process) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_of(process: Process) -> list[psutil.Process]:
    """The ranks that a command of fullbore has started: what the server of its children forked."""
    return [child for child in children(process) if child.ppid() != process.pid]


def ran(
    command: list[str], *, timeout_s: float = PATIENCE_S, cold: bool = False
) -> tuple[int | None, str]:
    """Exit status and everything said."""
    with started(command, cold=cold) as process:
        said, _ = process.communicate(timeout=timeout_s)
    return process.returncode, said


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def wait_for_steps(process: Process, run: Path, steps: int) -> None:
    """Until the run in this folder has written down this many lines more."""
    wanted = len(metrics(run)) + steps
    deadline_s = time.monotonic() + PATIENCE_S
    while len(metrics(run)) < wanted:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s, "no steps"
        time.sleep(0.05)
