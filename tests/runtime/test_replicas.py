"""D replicas of a pipeline train as one process does that sees the whole batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import replica_jobs as jobs
import torch
from ranks import run_ranks

SPLIT = ("split", 3, None)  # I and W: PEERS 4


def run(job: Any, replicas: int, ranks: int, *args: Any) -> list[Any]:
    return run_ranks(job, replicas * ranks, replicas, ranks, *args)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_the_whole_batch(ranks: int) -> None:
    cases = [("gpipe", 3, None), ("1f1b", 4, None), ("interleaved", 4, 2), ("looped-bfs", 2, 2)]
    cases += [SPLIT] if ranks == 2 else []
    everyone = run(jobs.whole_batch, 2, ranks, cases)
    for found in everyone:
        for one, other in zip(found, everyone[0], strict=True):
            assert one["off"] <= 1e-6, one
            assert one["loss"] == pytest.approx(one["expected"], rel=1e-6)
            assert one["loss"] == other["loss"]


def test_three_replicas() -> None:
    for found in run(jobs.whole_batch, 3, 1, [("1f1b", 2, None)]):
        assert all(one["off"] <= 1e-6 for one in found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_edges(ranks: int) -> None:
    everyone = run(jobs.edges, 2, ranks, ("1f1b", 3, None))
    for found in everyone:
        assert found["equal"] and found["accumulated"] and found["none"]
        assert found["norm"] == everyone[0]["norm"]
        assert found["norm"] == pytest.approx(found["norm_alone"], rel=1e-5)
        assert found["norm"] > 0.05 and found["clipped"] <= 2e-6
        assert found["evaluated"] == pytest.approx(found["evaluated_alone"], rel=1e-6)
        assert math.isnan(found["nan"])
        summed, alone, off = found["sum"]
        assert summed == pytest.approx(alone, rel=1e-6) and off <= 1e-6
        assert found["unused"] <= 1e-6
        assert found["bf16"] < 0.02
    assert any(found["side"] for found in everyone)


def test_11_token_weights_over_microbatches_and_replicas() -> None:
    cases = [("gpipe", 3, None), ("1f1b", 4, None), ("interleaved", 4, 2), SPLIT]
    for found in run(jobs.token_weights, 2, 2, cases):
        for one in found:
            assert one["off"] <= 2e-6, one
            assert one["loss"] == pytest.approx(one["expected"], rel=1e-6)
            assert one["evaluated"] == pytest.approx(one["expected"], rel=1e-6)
            assert one.get("zeros", True) and math.isnan(one.get("nothing", math.nan))


@pytest.mark.parametrize("case", [("1f1b", 3, None), ("interleaved", 2, 2)])
def test_tied_weights_and_clipping_over_both_dimensions(case: Any) -> None:
    everyone = run(jobs.tied, 2, 2, case, 0.05)
    tables = [table for found in everyone for table in found["tables"]]
    assert len(tables) == 4
    assert all(torch.equal(table, tables[0]) for table in tables)
    for found in everyone:
        assert found["norms"] == everyone[0]["norms"]
        assert found["norms"] == pytest.approx(found["alone"], rel=1e-4)
        assert found["off"] < 1e-4
