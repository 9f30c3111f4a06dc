"""One rank's process from start to end: its group, its threads, its run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console

from fullbore.errors import ConfigError
from fullbore.train.loop import train
from fullbore.train.report import Reporter, Silent
from fullbore.train.settings import TrainSettings
from fullbore.train.team import Team
from fullbore.train.trainer import Trainer

__all__ = ["RankPlace", "cores_here", "joined", "run_rank"]

_PATIENCE = timedelta(minutes=60)  # one rank may convert a model while the others wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a process stands among all ranks, and among those of its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def run_rank(
    settings: TrainSettings,
    place: RankPlace,
    *,
    console: Console,
    should_stop: Callable[[], bool],
) -> bool:
    """Run this rank of a training run to its end; whether it came there, or was stopped.

    Where place.size > 1, the ranks find each other through torchrun's environment. Raises
    FullboreError.
    """
    device = _device(settings, place)
    cores = cores_here()
    torch.set_num_threads(settings.threads or max(1, cores // place.local_size))
    _quiet_transformers()
    with joined(settings, place, device) as team:
        trainer = Trainer(settings, team, device=device, cores=cores)
        observer = Reporter(console) if team.leads else Silent()
        try:
            return train(trainer, observer=observer, should_stop=should_stop)
        finally:
            observer.close()
            trainer.close()


@contextmanager
def joined(settings: TrainSettings, place: RankPlace, device: torch.device) -> Iterator[Team]:
    """The team of all ranks, while they are joined. ConfigError unless there are P of them."""
    ranks = settings.pipeline_model_parallel_size
    if place.size != ranks:
        raise ConfigError(
            f"{place.size} processes were started and --pipeline-model-parallel-size is {ranks}: "
            f"start {ranks} processes (data parallelism is not there yet), or set "
            f"--pipeline-model-parallel-size {place.size}"
        )
    if place.size == 1:
        yield Team()
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield Team(
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            group=dist.new_group(backend="gloo", timeout=_PATIENCE),
        )
        dist.barrier()
    finally:
        dist.destroy_process_group()


def cores_here() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device(settings: TrainSettings, place: RankPlace) -> torch.device:
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if place.local_rank >= devices:
        raise ConfigError(
            f"there are {place.local_size} ranks on this machine and {devices} GPUs: use at most "
            f"{devices} ranks, or --device cpu"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _quiet_transformers() -> None:
    """No progress bars and advice of other people's between our own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
