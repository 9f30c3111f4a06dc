"""Ranks that act together beside the pipeline: a lost one is named to all others."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import run_outcomes

from fullbore.errors import ModelError, RankError
from fullbore.train.team import Team


def loses_one(rank: int, victim: int) -> str:
    """What is raised where a rank dies while all agree."""
    team = Team(rank=rank, size=4, group=dist.group.WORLD)
    assert team.gather(rank) == [0, 1, 2, 3]
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        team.together(lambda: None, wrong=ModelError)
    except RankError as error:
        return str(error)
    return "no error"


def stops_one(rank: int, victim: int) -> tuple[str, float]:
    """What is raised, and when, where a rank is stopped while all write a checkpoint."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    team = Team(rank=rank, size=3, group=group)
    team.gather(rank)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    begun_s = time.monotonic()
    try:  # the work's own talk runs out of time first, and closes the group
        team.together(lambda: dist.barrier(group), wrong=ModelError)
    except RankError as error:
        return str(error), time.monotonic() - begun_s
    return "no error", 0.0


@pytest.mark.slow
def test_a_rank_that_is_stopped_between_steps_is_named_in_time() -> None:
    outcomes = run_outcomes(stops_one, 3, 1, lost=[1])
    for survivor in (outcomes[0], outcomes[2]):
        said, took_s = survivor.value
        assert said.startswith("rank 1 failed: no sign of life within timeout_s"), said
        assert took_s < 2 + 5


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_between_steps_is_named(victim: int) -> None:
    outcomes = run_outcomes(loses_one, 4, victim)
    told = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert outcomes[victim].died == -9
    assert len(set(told)) == 1
    assert told[0].startswith(f"rank {victim} failed: the process died without a word")
