"""The training loop: steps, evaluations and checkpoints in order, until done or asked to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fullbore.errors import CheckpointError, ConfigError
from fullbore.runtime import SplitReport
from fullbore.train.checkpoint import has_checkpoints
from fullbore.train.export import export
from fullbore.train.step_report import StepReport
from fullbore.train.trainer import Trainer

__all__ = ["Observer", "train"]


class Observer(Protocol):
    """Who is told about a run: a terminal and files, or a test."""

    def begin(self, trainer: Trainer) -> None: ...
    def stepped(self, report: StepReport) -> None: ...
    def split(self, reports: Sequence[SplitReport]) -> None: ...
    def evaluated(self, step: int, loss: float) -> None: ...
    def saved(self, checkpoint: Path) -> None: ...
    def exported(self, folder: Path) -> None: ...
    def stopped(self, step: int) -> None: ...
    def nothing_left(self, step: int) -> None: ...


def train(trainer: Trainer, *, observer: Observer, should_stop: Callable[[], bool]) -> bool:
    """Train to the last step, or until should_stop() is true on any rank; every rank calls.

    Resumes from `load` where the settings say so. A checkpoint is written every save_interval
    steps, at the end, and before stopping; the model is exported at the end. Returns whether the
    run came to its end. Raises FullboreError.
    """
    settings = trainer.settings
    _check_target(trainer)
    if settings.load is not None:
        trainer.resume(settings.load)
    observer.begin(trainer)
    _evaluate(trainer, observer)
    saved_at = trainer.step
    if saved_at >= settings.train_iters:
        observer.nothing_left(saved_at)
    while trainer.step < settings.train_iters:
        if trainer.is_asked_to_stop(should_stop()):
            _settle(trainer, observer)
            if saved_at != trainer.step:
                observer.saved(trainer.save())
            observer.stopped(trainer.step)
            return False
        for report in trainer.advance():
            observer.stepped(report)
        if trainer.steps_here == 2 and trainer.plan.schedule.splits_backward:
            observer.split(trainer.split_reports())
        if _is_due(settings.eval_interval, trainer) or _is_due(settings.save_interval, trainer):
            _settle(trainer, observer)
        if _is_due(settings.eval_interval, trainer):
            _evaluate(trainer, observer)
        if _is_due(settings.save_interval, trainer):
            observer.saved(trainer.save())
            saved_at = trainer.step
    _settle(trainer, observer)
    if saved_at != trainer.step:
        observer.saved(trainer.save())
    _export(trainer, observer)
    return True


def _settle(trainer: Trainer, observer: Observer) -> None:
    """Weights are about to be read: let every step be certain."""
    for report in trainer.settle():
        observer.stepped(report)


def _is_due(interval: int | None, trainer: Trainer) -> bool:
    """Every `interval` steps, and after the last one."""
    if interval is None:
        return False
    return trainer.step % interval == 0 or trainer.step == trainer.settings.train_iters


def _check_target(trainer: Trainer) -> None:
    """Refuse to mix two runs' checkpoints, or to find at the end that there is no room."""
    settings = trainer.settings

    def check() -> None:
        if has_checkpoints(settings.save) and settings.load is None:
            raise ConfigError(
                f"{settings.save} has checkpoints of another run: go on with it by --load "
                f"{settings.save}, or give another folder with --save"
            )
        if settings.export is not None and settings.export.exists():
            raise ConfigError(f"{settings.export} exists already: --export makes a new folder")

    trainer.team.together(check, wrong=ConfigError)


def _evaluate(trainer: Trainer, observer: Observer) -> None:
    loss = trainer.evaluate()
    if loss is not None:
        observer.evaluated(trainer.step, loss)


def _export(trainer: Trainer, observer: Observer) -> None:
    target = trainer.settings.export
    if target is None:
        return

    def work() -> Path:
        return export(trainer.settings.save, target) if trainer.team.leads else target

    observer.exported(trainer.team.together(work, wrong=CheckpointError))
