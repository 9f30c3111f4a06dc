"""P processes on this machine that do one job together, and what the figures were taken on."""

from __future__ import annotations

import os
import pickle
import platform
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from fullbore.runtime import wake_on_time
from fullbore.train.launch import end_with_parent

Job = Callable[[int, Any], Any]

_TIMEOUT = timedelta(seconds=120)


def run(ranks: int, job: Job, setting: Any) -> list[Any]:
    """What job(rank, setting) gives on each of P ranks, joined over gloo, one thread each.

    job: a function of a module, so that a fresh process finds it.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, args=(ranks, job, setting, folder), nprocs=ranks)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def _on_rank(rank: int, ranks: int, job: Job, setting: Any, folder: str) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    wake_on_time()
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(job(rank, setting)))
    dist.barrier()
    os._exit(0)  # without the groups' slow farewell


def machine() -> str:
    """What the figures were taken on."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    )
