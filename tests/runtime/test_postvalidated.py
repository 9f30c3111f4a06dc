"""Optimizer steps without a barrier give what steps with one give, to the bit."""

from __future__ import annotations

from typing import Any

import barrier_jobs as jobs
import pytest
from ranks import run_ranks

CASES: dict[int, list[Any]] = {
    2: [
        (("1f1b", 3, None), "a rate that is a tensor"),
        (("split", 3, None), "sgd"),
        (("gpipe", 2, None), "changes gradients"),
    ],
    4: [(("1f1b", 4, None), "sgd"), (("interleaved", 4, 2), "adamw")],
}


def assert_same(everyone: list[Any], ranks: int) -> None:
    for found in everyone:
        for one, first in zip(found, everyone[0], strict=True):
            assert repr(one["figures"]) == repr(first["figures"])  # NaN is not itself
            assert repr(one["figures"]) == repr(one["expected"])
            assert one["same"] and one["moved"], one["case"]
            assert one["votes"] == {float(ranks)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_steps_are_those_with_a_barrier(ranks: int) -> None:
    everyone = run_ranks(jobs.differences, ranks, ranks, CASES[ranks])
    assert_same(everyone, ranks)
    for one in everyone[0]:
        clipped = [i for i, (_, _, clipped, _) in enumerate(one["figures"]) if clipped]
        skipped = [i for i, (_, _, _, skipped) in enumerate(one["figures"]) if skipped]
        assert set(jobs.LARGE) <= set(clipped) and len(clipped) < 8
        assert skipped == [jobs.NOT_A_NUMBER]
        assert any(one["redone"]) and len(one["redone"]) == jobs.STEPS


def test_ten_steps_of_replicas_are_those_with_a_barrier() -> None:
    everyone = run_ranks(jobs.differences, 4, 2, [(("1f1b", 3, None), "adamw")], 2)
    assert_same(everyone, 4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_nobody_waits_for_the_last_rank_s_optimizer(ranks: int) -> None:
    assert run_ranks(jobs.nobody_waits, ranks, ranks) == [True] * ranks


def test_what_cannot_be_validated_late_is_refused() -> None:
    for held, changed in run_ranks(jobs.refusals, 2, 2):
        assert "weights have gradients already" in held
        assert "call finish() before this step" in changed
