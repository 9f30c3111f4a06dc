"""Offload on real ranks: bit for bit the gradients of one process, and nothing left behind."""

import os

import pytest
from offload_jobs import Case, compare, fails, is_killed, with_replicas
from ranks import run_outcomes, run_ranks

CASES = [
    Case("gpipe", 4),
    Case("1f1b", 6),
    Case("1f1b", 6, ahead=0),
    Case("interleaved", 4, 2),
    Case("1f1b", 5, delay=2),
    Case("interleaved", 4, 2, ahead=2, delay=1),
]
MODELS = [Case("1f1b", 5, model=model) for model in ("tied", "own-function", "half-frozen")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_equal_one_process_and_memory_is_what_the_verifier_says(ranks, tmp_path) -> None:
    cases = CASES + MODELS if ranks == 2 else CASES[:1] + CASES[1::2]
    everyone = run_ranks(compare, ranks, ranks, cases, str(tmp_path))
    for case, found in zip(cases, zip(*everyone, strict=True), strict=True):
        for rank, one in enumerate(found):
            assert one.wrong == [], f"{case} on rank {rank}"
            assert one.files == [], "a file without a name, gone with the pipeline"
            if len(one.kept) == 1 and case.delay is None:
                (kept,) = one.kept
                assert one.peak_bytes == one.live * kept, f"{case} on rank {rank}"
                assert one.peak_bytes_without == one.live_without * kept
            less = one.peak_bytes < one.peak_bytes_without
            assert less == (one.live < one.live_without), f"{case} on rank {rank}: {one}"
        if case.family == "gpipe":
            assert all(one.live < one.live_without for one in found)


def test_replicas_and_main_gradients(tmp_path) -> None:
    assert run_ranks(with_replicas, 4, str(tmp_path)) == [[]] * 4


def test_a_failure_with_activations_away_leaves_nothing(tmp_path) -> None:
    for found in run_ranks(fails, 2, 2, str(tmp_path)):
        assert "rank 0 failed in 0B1 of step 2: ValueError: on purpose" in found["error"]
        assert found["wrong"] == [] and found["left"] == []


def test_a_killed_rank_leaves_no_file(tmp_path) -> None:
    told, killed = run_outcomes(is_killed, 2, 2, str(tmp_path), lost=[1])
    assert told.value == [] and killed.died == -9
    assert os.listdir(tmp_path) == []
