"""The course of a run: which settings decide what its steps compute.

Which of them a resumed run was given otherwise is told. How many ranks there are, how they are
scheduled and what they recompute are not among them. A checkpoint keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fullbore.train.settings import TrainSettings, flag

__all__ = ["course_of", "other_course"]

_BATCH = "global_batch_size"
_DECIDING = (
    *("seq_length", "train_iters", "data", "held_out", "seed", "bf16"),
    *("lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad"),
    *("adam_beta1", "adam_beta2", "adam_eps"),
)


def course_of(settings: TrainSettings) -> dict[str, Any]:
    """What decides the steps of a run, by setting, as JSON has it."""
    given = settings.model_dump(mode="json", include=set(_DECIDING))
    return {_BATCH: settings.step_sequences, **{name: given[name] for name in _DECIDING}}


def other_course(before: Mapping[str, Any], settings: TrainSettings) -> str | None:
    """In one line, what is otherwise than where a run began that goes on; None where nothing is.

    before: what `course_of` gave then; what it does not name is not compared.
    """
    now = course_of(settings)
    changed = [name for name, value in now.items() if name in before and before[name] != value]
    if not changed:
        return None
    told = ", ".join(f"{_told(name, now)} (was {_shown(before[name])})" for name in changed)
    return f"going on otherwise than before, so not with the identical trajectory: {told}"


def _told(name: str, values: Mapping[str, Any]) -> str:
    return f"{flag(name)} {_shown(values[name])}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
