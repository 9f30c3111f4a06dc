"""Run a function as P real processes joined by gloo, bounded in time, and collect what they give.

Processes are forked from a server that has imported torch and transformers once, so that each
test starts clean ones in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from fullbore.train.launch import end_with_parent

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "numba",
        "fullbore.runtime",
        "fullbore.train.launch",
        "fullbore.train.trainer",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "transformers.models.gpt2.modeling_gpt2",
    ]
)


def start_server() -> None:
    """Start the server, before something else starts one that has imported less."""
    forkserver.ensure_running()


@dataclass
class Outcome:
    """What one rank did: its result, or its error; died is its exit code if it gave neither."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    died: int | None = None
    after_s: float = 0.0


def run_ranks(
    job: Callable[..., Any], ranks: int, *args: Any, timeout_s: float = 55.0, **kwargs: Any
) -> list[Any]:
    """Call job(rank, *args, **kwargs) on every rank; their values in order, or the first error."""
    outcomes = run_outcomes(job, ranks, *args, timeout_s=timeout_s, **kwargs)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.died is not None:
            raise AssertionError(f"rank {rank} failed: {outcome.trace or outcome}")
    return [outcome.value for outcome in outcomes]


def run_outcomes(
    job: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout_s: float = 55.0,
    lost: Sequence[int] = (),
    **kwargs: Any,
) -> list[Outcome]:
    """As `run_ranks`, but failures are part of the result.

    lost: ranks that give nothing, being stopped; they are killed once the others are done.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(job, ranks, args, kwargs, os.path.join(folder, "store"), timeout_s, lost)


def _run(
    job: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    store: str,
    timeout_s: float,
    lost: Sequence[int],
) -> list[Outcome]:
    started_s = time.monotonic()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(
            target=_one_rank, args=(job, rank, ranks, store, pipe[1], args, kwargs), daemon=True
        )
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    outcomes: dict[int, Outcome] = {}
    try:
        readers = {reader: rank for rank, (reader, _) in enumerate(pipes) if rank not in lost}
        while readers and (left_s := started_s + timeout_s - time.monotonic()) > 0:
            for ready in wait(list(readers), left_s):
                rank = readers.pop(ready)
                outcomes[rank] = _read(ready, processes[rank])
                outcomes[rank].after_s = time.monotonic() - started_s
    finally:
        for process in processes:
            process.join(0.5 if len(outcomes) == ranks else 0)
            if process.is_alive():
                process.kill()
                process.join()
    outcomes |= {rank: Outcome(died=processes[rank].exitcode) for rank in lost}
    missing = sorted(set(range(ranks)) - set(outcomes))
    if missing:
        raise TimeoutError(f"ranks {missing} gave nothing within {timeout_s} s")
    return [outcomes[rank] for rank in range(ranks)]


def _read(reader: Connection, process: Any) -> Outcome:
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        process.join(5)
        return Outcome(died=process.exitcode)


def _one_rank(
    job: Callable[..., Any],
    rank: int,
    ranks: int,
    store: str,
    writer: Connection,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    outcome = Outcome()
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=40),
        )
        outcome.value = job(rank, *args, **kwargs)
    except BaseException as error:
        outcome.error, outcome.trace = error, traceback.format_exc()
    try:
        body = pickle.dumps(outcome)
    except Exception:
        body = pickle.dumps(Outcome(error=RuntimeError(repr(outcome.error)), trace=outcome.trace))
    writer.send_bytes(body)
    writer.close()
    os._exit(0)  # groups of failed ranks would wait for each other in their destructors
