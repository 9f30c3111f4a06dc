"""What a resumed run is given otherwise is told, where it decides what the steps compute."""

from __future__ import annotations

from typing import Any

import pytest

from fullbore.train.course import course_of, other_course
from fullbore.train.settings import TrainSettings


def settings(**changes: Any) -> TrainSettings:
    return TrainSettings.of({"model": "m", "data": ["a.txt", "b.txt"], **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seq_length": 64}, "--seq-length 64 (was 512)"),
        ({"global_batch_size": 16}, "--global-batch-size 16 (was 8)"),
        ({"train_iters": 7}, "--train-iters 7 (was 100)"),
        ({"data": "c.txt"}, "--data c.txt (was a.txt b.txt)"),
        ({"lr": 0.5, "seed": 1}, "--seed 1 (was 1234), --lr 0.5 (was 0.0001)"),
    ],
)
def test_what_decides_the_steps_is_told(changes: dict[str, Any], told: str) -> None:
    line = other_course(course_of(settings()), settings(**changes))
    assert line is not None and line.endswith(f"not with the identical trajectory: {told}")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pipeline_model_parallel_size": 2, "schedule": "gpipe"},
        {"data_parallel_size": 4, "micro_batch_size": 2},
        {"recompute": "full", "save_interval": 3, "optimizer_barrier": False},
    ],
)
def test_what_does_not_is_not(changes: dict[str, Any]) -> None:
    assert other_course(course_of(settings()), settings(**changes)) is None


def test_a_checkpoint_of_a_release_that_kept_nothing_of_it_is_resumed_in_silence() -> None:
    assert other_course({}, settings(seq_length=64)) is None
