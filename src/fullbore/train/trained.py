"""A real training job under one schedule, as a comparison runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fullbore.compare import Length, Setting, Training
from fullbore.ir import Schedule
from fullbore.train.comparison import Machine, Made, Stepped
from fullbore.train.peak import peak_source
from fullbore.train.rank import quiet_transformers
from fullbore.train.settings import TrainSettings
from fullbore.train.trainer import Trainer

__all__ = ["TrainedRunner", "TrainingJob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The same model and text under each of some schedules; settings: one for each of them."""

    schedules: tuple[Schedule, ...]
    settings: tuple[TrainSettings, ...]
    length: Length

    @property
    def imports(self) -> tuple[str, ...]:
        """What every rank needs."""
        return __name__, "transformers.modeling_utils"

    @property
    def device(self) -> str:
        """auto, cpu or cuda."""
        return self.settings[0].device

    @property
    def threads(self) -> int | None:
        """Of a rank; None shares the cores out."""
        return self.settings[0].threads

    def make(self, index: int, machine: Machine) -> Made:
        """The trainer of one schedule on this rank. Raises FullboreError."""
        quiet_transformers()
        settings, schedule = self.settings[index], self.schedules[index]
        trainer = Trainer(
            settings,
            machine.team,
            device=machine.device,
            cores=machine.cores,
            schedule=None if settings.schedule == schedule.name else schedule,
        )
        setting = Setting(
            ranks=schedule.ranks,
            microbatches=schedule.microbatches // schedule.slices,
            steps=self.length.steps,
            warmup_steps=self.length.warmup_steps,
            overlap=settings.overlap_p2p_communication,
            device=_device_name(machine.device),
            cores=machine.cores,
            threads=machine.threads,
            message_bytes=_boundary_bytes(trainer),
            training=_training_of(trainer),
        )
        return Made(runner=TrainedRunner(trainer), setting=setting)


class TrainedRunner:
    """One rank's trainer, told step by step what to do."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def schedule(self) -> Schedule:
        """The schedule that the trainer runs."""
        return self._trainer.plan.schedule

    def evaluate(self) -> float | None:
        """Mean loss over the held-out batches; None where nothing is held out."""
        return self._trainer.evaluate()

    def step(self) -> Stepped:
        """One training step; it lasts until the last rank's optimizer is done."""
        report = self._trainer.train_step()
        assert report.timeline is not None
        return Stepped(
            step_s=max(self._trainer.team.gather(report.step_s)),
            loss=report.loss,
            timeline=report.timeline,
            peak_activation_bytes=report.peak_activation_bytes,
            stage_activation_bytes=report.stage_activation_bytes,
            stage_held_bytes=report.stage_held_bytes,
            stage_input_bytes=report.stage_input_bytes,
            stage_offload_bytes=report.stage_offload_bytes,
        )

    def close(self) -> None:
        """Let go of the pipeline."""
        self._trainer.close()


def _training_of(trainer: Trainer) -> Training:
    """What a comparison says of the job itself; the same under every schedule."""
    settings, plan, corpus = trainer.settings, trainer.plan, trainer.corpus
    tokens = settings.step_sequences * settings.seq_length
    skipped = f", {corpus.skipped} files skipped that are no UTF-8" if corpus.skipped else ""
    return Training(
        model=f"{plan.anatomy.family}, {plan.anatomy.layers} layers",
        text=(
            f"Microbatches of {settings.micro_batch_size} × {settings.seq_length} tokens, from "
            f"{corpus.documents} documents with {len(corpus.train):,} tokens to train on and "
            f"{len(corpus.held_out):,} held out{skipped}"
        ),
        tokens=tokens,
        flops=plan.costs.step_flops_per_token * tokens,
        flops_count=plan.costs.counts,
        peak_flops=trainer.peak_flops,
        peak_source=peak_source(trainer.device, _dtype(trainer)),
    )


def _boundary_bytes(trainer: Trainer) -> int:
    """Bytes of one hidden state [b, s, h] between two stages; 0 where no width is named."""
    settings, config = trainer.settings, trainer.plan.config
    width: Any = getattr(config.get_text_config(), "hidden_size", 0)
    tokens = settings.micro_batch_size * settings.seq_length
    return tokens * int(width) * _dtype(trainer).itemsize


def _dtype(trainer: Trainer) -> torch.dtype:
    return torch.bfloat16 if trainer.settings.bf16 else torch.float32


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
