"""Trials of one case: P processes over gloo, bounded in time, and what became of every rank.

A rank that raises ends its process at once, as an uncaught error does; its peers then see what they
would see of it. Processes are ended by their own handles, whatever they were doing.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fullbore.train.launch import end_with_parent

Job = Callable[..., Any]

GROUP_TIMEOUT_S = 4.0  # what gloo waits for a peer; 30 minutes unless asked otherwise
TRIAL_LIMIT_S = 9.0
CASE_LIMIT_S = 20.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *("torch", "torch.distributed.pipelining", "torch.distributed.fsdp", "torch._dynamo"),
        *("sympy", "fullbore.train.launch"),
    ]
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one rank; exactly one of value, error, died and hung says it.

    error: the type and first line; cause: those of what is at the bottom of it, if another.
    died: the exit code of a process that said nothing, `error` then its last words.
    logged: the action that torch's log names as the one that raised.
    """

    value: Any = None
    error: str | None = None
    cause: str | None = None
    died: int | None = None
    hung: bool = False
    logged: str | None = None
    after_s: float = 0.0

    @property
    def failed(self) -> bool:
        return self.error is not None or self.died is not None or self.hung


class OutOfTime(Exception):
    """The case's time is over."""


class Bench:
    """Runs the trials of one case, all together within `CASE_LIMIT_S`."""

    def __init__(self, limit_s: float = CASE_LIMIT_S) -> None:
        self._until_s = time.monotonic() + limit_s

    def run(
        self, job: Job, ranks: int, *args: Any, limit_s: float = TRIAL_LIMIT_S
    ) -> list[Outcome]:
        """What became of job(rank, ranks, *args) on every rank.

        job: a function of a module, so that a fresh process finds it.
        """
        left_s = self._until_s - time.monotonic()
        if left_s < 1:
            raise OutOfTime(f"not tried: the case's {CASE_LIMIT_S:.0f} s were over")
        with tempfile.TemporaryDirectory() as folder:
            outcomes = _run(job, ranks, args, Path(folder), min(limit_s, left_s))
        if left_s < limit_s and any(outcome.hung for outcome in outcomes):
            raise OutOfTime(f"not known: the case's {CASE_LIMIT_S:.0f} s were over")
        return outcomes


def warm_up() -> None:
    """Have the parent of all trials' processes import torch, which no case shall pay for."""
    Bench(60).run(_nothing, 1, limit_s=60)


def _nothing(rank: int, ranks: int) -> None:
    pass


def _run(
    job: Job, ranks: int, args: tuple[Any, ...], folder: Path, limit_s: float
) -> list[Outcome]:
    pipes = [_context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        _context.Process(
            target=_on_rank, args=(job, rank, ranks, folder, pipe[1], args), daemon=True
        )
        for rank, pipe in enumerate(pipes)
    ]
    begun_s = time.monotonic()
    for rank, process in enumerate(processes):
        (folder / f"said{rank}").touch()
        process.start()
    for _, writer in pipes:
        writer.close()
    outcomes = [Outcome(hung=True, after_s=limit_s) for _ in range(ranks)]
    waiting = {reader: rank for rank, (reader, _) in enumerate(pipes)}
    try:
        while waiting and (left_s := begun_s + limit_s - time.monotonic()) > 0:
            for reader in wait(list(waiting), left_s):
                rank = waiting.pop(reader)  # type: ignore[call-overload]
                outcomes[rank] = _read(reader, processes[rank], folder / f"said{rank}")  # type: ignore[arg-type]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return outcomes


def _read(reader: Connection, process: Any, said: Path) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(reader.recv_bytes())
        return outcome
    except EOFError:
        process.join(5)
        lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
        words = next((line for line in lines if "what():" in line), lines[-1] if lines else "")
        return Outcome(died=process.exitcode or 0, error=words.strip() or None)


def _on_rank(
    job: Job, rank: int, ranks: int, folder: Path, writer: Connection, args: tuple[Any, ...]
) -> None:
    end_with_parent()
    _keep_quiet(folder / f"said{rank}")
    torch.set_num_threads(1)
    begun_s = time.monotonic()
    outcome = Outcome()
    try:
        join(rank, ranks, folder / "store")
        begun_s = time.monotonic()
        outcome.value = job(rank, ranks, *args)
    except BaseException as error:
        outcome.error, outcome.cause = _first_line(error), _bottom(error)
        outcome.logged = _logged(folder / f"said{rank}")
    outcome.after_s = time.monotonic() - begun_s
    writer.send_bytes(pickle.dumps(outcome))
    writer.close()
    if outcome.failed:
        os._exit(1)  # as an uncaught error would end it; the peers see the connection close
    time.sleep(60)  # whoever is done stays until the others are: the parent ends it


def join(rank: int, ranks: int, store: Path) -> None:
    """Make the default group of this trial's processes, over gloo."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def _keep_quiet(said: Path) -> None:
    """Send what the process and its libraries write to a file, read if it dies without a word."""
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _logged(said: Path) -> str | None:
    named = re.search(r"when running action (\w+)", said.read_text(errors="replace"))
    return named[1] if named else None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _bottom(error: BaseException) -> str | None:
    bottom = error
    while bottom.__cause__ is not None:
        bottom = bottom.__cause__
    return None if bottom is error else _first_line(bottom)
