"""D replicas of a pipeline train as one process does that sees the whole batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import replica_jobs as jobs
import sharded_jobs as sharded
import torch
from ranks import run_outcomes, run_ranks

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


def test_zero_1_by_torch_is_plain_adamw_to_the_bit() -> None:
    everyone = run(sharded.zero_1, 2, 2, ("1f1b", 3, None))
    assert all(found["equal"] for found in everyone)
    for pair in (everyone[::2], everyone[1::2]):
        shards, whole = zip(*(found["held"] for found in pair), strict=True)
        assert sum(shards) == whole[0] == whole[1]
        assert max(shards) < 0.6 * whole[0]


def test_fsdp_stages_gather_and_reduce_once_a_step() -> None:
    cases = [("gpipe", 3, None), ("1f1b", 3, None), ("interleaved", 4, 2)]
    for found in run(sharded.fsdp_stages, 2, 2, cases):
        for one in found:
            assert one["calls"] == [(one["units"], one["units"])] * 4, one
            assert one["norms"] == pytest.approx(one["alone"], rel=1e-5)
            assert one["loss"] == pytest.approx(one["expected"], rel=1e-6)
            assert one["evaluated"] == pytest.approx(one["expected"], rel=1e-6)
            assert one["off"] < 1e-5


def test_fsdp_stages_are_refused_where_they_would_be_wrong() -> None:
    for split, tied, no_mesh in run(sharded.fsdp_refused, 2, 2):
        assert "stage 0 is sharded by fully_shard" in split and "I and W" in split
        assert "tied weights" in tied
        assert 'use fully_shard(module, mesh=mesh["dp"])' in no_mesh


@pytest.mark.parametrize("where", ["action", "reduction"])
def test_a_failure_in_one_replica_reaches_every_rank(where: str) -> None:
    everyone = run(jobs.fails, 2, 2, ("1f1b", 3, None), where)
    for found in everyone:
        assert found["said"] == everyone[0]["said"]
        assert found["said"].startswith("rank 3 failed in 1")  # a rank of the default group
        assert ("on purpose" if where == "action" else "use sparse=False") in found["said"]
        assert found["took_s"] < 5
        assert found["off"] <= 1e-6


def test_a_rank_that_is_killed_is_named_in_every_replica() -> None:
    outcomes = run_outcomes(jobs.dies, 4, 2, 2, ("1f1b", 3, None))
    assert outcomes[2].died == -9
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        assert outcome.value is not None, outcome.trace
        assert "rank 2 failed" in outcome.value and "died without a word" in outcome.value
