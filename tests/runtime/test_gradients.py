"""Gradients with the pipeline are those without it, bit for bit, for every schedule."""

import gradient_jobs as jobs
import pytest
import torch
from ranks import run_ranks

SCHEDULES = [("gpipe", None), ("1f1b", None), ("interleaved", 2), ("looped-bfs", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_equal_one_process(ranks: int) -> None:
    cases = [(name, m, v) for name, v in SCHEDULES for m in (1, 2, 3, 8)]
    cases += [("interleaved", 5, 3), ("looped-bfs", 2, 1), ("interleaved", 3, 1)]
    for found in run_ranks(jobs.compare_cases, ranks, ranks, cases):
        assert found == {case: [] for case in cases}


def test_blocking_sends_give_the_same_gradients() -> None:
    cases = [("gpipe", 8, None), ("1f1b", 5, None), ("interleaved", 4, 2)]
    for found in run_ranks(jobs.compare_cases, 2, 2, cases, overlap_p2p=False):
        assert found == {case: [] for case in cases}


def test_shapes_described_each_time_give_the_same_gradients() -> None:
    cases = [("1f1b", 5, None), ("interleaved", 4, 2)]
    for found in run_ranks(jobs.compare_cases, 2, 2, cases, static_shapes=False):
        assert found == {case: [] for case in cases}


def test_a_split_backward_gives_the_same_gradients() -> None:
    cases = [("split", 3, None)]
    for found in run_ranks(jobs.compare_cases, 2, 2, cases):
        assert found == {case: [] for case in cases}


def test_a_recorded_step_gives_the_same_gradients() -> None:
    cases = [("1f1b", 5, None)]
    for found in run_ranks(jobs.compare_cases, 2, 2, cases, record=True):
        assert found == {case: [] for case in cases}


@pytest.mark.slow
def test_sgd_depends_on_neither_ranks_nor_microbatches() -> None:
    reference = run_ranks(jobs.sgd, 1, 1, 1)[0]
    for ranks in (1, 2, 4):
        for microbatches in (1, 2, 8):
            found: dict[str, torch.Tensor] = {}
            for part in run_ranks(jobs.sgd, ranks, ranks, microbatches):
                found |= part
            assert found.keys() == reference.keys()
            for name, value in found.items():
                torch.testing.assert_close(value, reference[name], rtol=1e-5, atol=1e-6)
