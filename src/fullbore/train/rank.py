"""One rank's process from start to end: its group, its threads, its run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.console import Console

from fullbore.train.loop import train
from fullbore.train.place import RankPlace, cores_here, device_for, joined
from fullbore.train.report import Reporter, Silent
from fullbore.train.settings import TrainSettings
from fullbore.train.trainer import Trainer

__all__ = ["quiet_transformers", "run_rank"]


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
    device = device_for(place, settings.device)
    cores = cores_here()
    torch.set_num_threads(settings.threads or max(1, cores // place.local_size))
    quiet_transformers()
    with joined(
        place,
        device,
        ranks=settings.pipeline_model_parallel_size,
        replicas=settings.data_parallel_size,
        patience_s=60 * settings.distributed_timeout_minutes,
    ) as team:
        trainer = Trainer(
            settings,
            team,
            device=device,
            cores=cores,
            on_stall=lambda words: console.print(
                words, markup=False, highlight=False, soft_wrap=True
            ),
        )
        observer = Reporter(console) if team.leads else Silent()
        try:
            return train(trainer, observer=observer, should_stop=should_stop)
        finally:
            observer.close()
            trainer.close()


def quiet_transformers() -> None:
    """No progress bars and advice of other people's between our own lines."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
