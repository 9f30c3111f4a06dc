"""What a person sees of a run: a progress bar, or lines where there is no terminal; and files.

`metrics.jsonl` in the run's folder gets one JSON object a step or evaluation, and goes on where
it was when a run is resumed; TensorBoard gets the same figures if asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fullbore.errors import ConfigError
from fullbore.runtime import SplitReport
from fullbore.train.course import other_course
from fullbore.train.step_report import StepReport
from fullbore.train.trainer import Trainer

__all__ = ["METRICS", "Reporter", "Silent"]

METRICS = "metrics.jsonl"


class Silent:
    """The observer of a rank that does not speak."""

    def begin(self, trainer: Trainer) -> None:
        """Say nothing."""

    def stepped(self, report: StepReport) -> None:
        """Say nothing."""

    def split(self, reports: Sequence[SplitReport]) -> None:
        """Say nothing."""

    def evaluated(self, step: int, loss: float) -> None:
        """Say nothing."""

    def saved(self, checkpoint: Path) -> None:
        """Say nothing."""

    def exported(self, folder: Path) -> None:
        """Say nothing."""

    def stopped(self, step: int) -> None:
        """Say nothing."""

    def nothing_left(self, step: int) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing to close."""


class Reporter:
    """The observer of the leading rank."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._metrics: TextIO | None = None
        self._board: Any = None
        self._interval = 1

    def begin(self, trainer: Trainer) -> None:
        """Describe the run and open its files; ConfigError where they cannot be written."""
        settings = trainer.settings
        self._interval = settings.log_interval
        try:
            settings.save.mkdir(parents=True, exist_ok=True)
            self._metrics = (settings.save / METRICS).open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to --save {settings.save}: {error}") from error
        self._board = _open_board(settings.tensorboard_dir)
        for line in _introduction(trainer):
            self._say(line)
        if self._console.is_terminal:
            self._start_bar(trainer)

    def stepped(self, report: StepReport) -> None:
        """Show a step and write it down."""
        figures = _figures(report)
        self._write({"step": report.step, **figures})
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=report.step, shown=_line(report))
        elif report.step % self._interval == 0:
            self._say(f"step {report.step}  {_line(report)}")

    def evaluated(self, step: int, loss: float) -> None:
        """Show a held-out loss and write it down."""
        self._write({"step": step, "held_out_loss": loss})
        self._say(f"step {step}  held-out loss {loss:.4f}")

    def split(self, reports: Sequence[SplitReport]) -> None:
        """Say which weights do not wait for W, and what that costs."""
        for line in _what_goes_with_i(reports):
            self._say(line)

    def saved(self, checkpoint: Path) -> None:
        """Say where a checkpoint lies."""
        self._say(f"saved {checkpoint}")

    def exported(self, folder: Path) -> None:
        """Say where the exported model lies."""
        self._say(f"exported {folder}, a folder that transformers loads")

    def stopped(self, step: int) -> None:
        """Say that the run was asked to stop."""
        self._say(f"stopped after step {step}, as asked; --load goes on from there")

    def nothing_left(self, step: int) -> None:
        """Say that a resumed run is at its end already."""
        self._say(
            f"nothing is left to train: the checkpoint is of step {step}, and --train-iters counts "
            "from the run's beginning; raise it to go on"
        )

    def close(self) -> None:
        """Close bar and files."""
        if self._progress is not None:
            self._progress.stop()
        if self._metrics is not None:
            self._metrics.close()
        if self._board is not None:
            self._board.close()

    def _start_bar(self, trainer: Trainer) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task(
            "", total=trainer.settings.train_iters, completed=trainer.step, shown=""
        )
        self._progress.start()

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _write(self, figures: Mapping[str, Any]) -> None:
        if self._metrics is not None:
            try:
                self._metrics.write(json.dumps(figures) + "\n")
                self._metrics.flush()
            except OSError as error:  # no reason to lose the run
                self._say(f"metrics are no longer written: {error}")
                self._metrics = None
        if self._board is not None:
            for name, value in figures.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(name, value, figures["step"])


def _introduction(trainer: Trainer) -> list[str]:
    settings, plan = trainer.settings, trainer.plan
    schedule, corpus = plan.schedule, trainer.corpus
    lines = [
        f"{plan.anatomy.family}, {plan.anatomy.layers} layers, on {_ranks(trainer)}: "
        f"{schedule.name}, {schedule.virtual_stages} stages a rank, "
        f"{settings.microbatches} microbatches of {settings.micro_batch_size} x "
        f"{settings.seq_length} tokens"
        + (f" in {schedule.slices} slices" if schedule.slices > 1 else ""),
        *plan.describe(),
        f"text: {corpus.documents} documents, {len(corpus.train)} tokens to train on, "
        f"{len(corpus.held_out)} held out"
        + (f", {corpus.skipped} files skipped that are no UTF-8" if corpus.skipped else ""),
        f"MFU is against {trainer.peak_flops / 1e12:.3g} TFLOP/s of all ranks together and counts "
        f"{plan.costs.counts}",
    ]
    lines += _recomputed(trainer)
    if trainer.oversubscribed:
        lines.append(
            "more ranks than cores: they take turns, so step times say little and no bubble is told"
        )
    if trainer.resumed_from is not None:
        lines.append(f"resumed after step {trainer.step}")
        lines += filter(None, [other_course(trainer.resumed_from.course, settings)])
    return lines


def _ranks(trainer: Trainer) -> str:
    ranks, replicas = trainer.plan.schedule.ranks, trainer.team.replicas
    return f"{ranks} ranks" if replicas == 1 else f"{replicas} replicas of {ranks} ranks"


def _recomputed(trainer: Trainer) -> list[str]:
    """Which stages recompute fewer layers than asked, since they have no more."""
    asked = trainer.settings.recomputation
    if not isinstance(asked, int):
        return []
    short = [part for part in trainer.plan.parts if part.layers < asked]
    told = ", ".join(f"stage {part.stage} has {part.layers}" for part in short)
    return [f"recomputed are {asked} layers of each stage; {told}"] if short else []


def _what_goes_with_i(reports: Sequence[SplitReport]) -> list[str]:
    """One line a stage of which some product goes with I; one for all where none does."""
    lines = []
    for report in {report.stage: report for report in reports}.values():  # replicas say the same
        if report.share_with_input > 0:
            names = ", ".join(report.with_input[:3])
            more = len(report.with_input) - 3
            lines.append(
                f"split backward, stage {report.stage}: {report.share_with_input:.0%} of the "
                f"weights' multiplications go with I, in {names}"
                + (f" and {more} more" if more > 0 else "")
            )
    return lines or ["split backward: every linear layer's weight gradient waits for W"]


def _figures(report: StepReport) -> dict[str, Any]:
    return {
        "loss": report.loss,
        "lr": report.lr,
        "grad_norm": report.grad_norm,
        "step_s": report.step_s,
        "tokens_per_s": report.tokens_per_s,
        "mfu": report.mfu,
        "bubble_fraction": report.bubble_fraction,
        "peak_activation_bytes": report.peak_activation_bytes,
    }


def _line(report: StepReport) -> str:
    bubble = report.bubble_fraction
    return (
        f"loss {report.loss:.4f}  {report.tokens_per_s:,.0f} tokens/s  MFU {report.mfu:.1%}  "
        + (f"bubble {bubble:.1%}" if bubble is not None else "bubble n/a")
    )


def _open_board(folder: Path | None) -> Any:
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "--tensorboard-dir needs the package tensorboard: pip install tensorboard"
        ) from error
    return SummaryWriter(log_dir=str(folder))
