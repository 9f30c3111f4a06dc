"""Ranks that act together beside the pipeline: a lost one is named to all others."""

from __future__ import annotations

import os
import signal

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


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_between_steps_is_named(victim: int) -> None:
    outcomes = run_outcomes(loses_one, 4, victim)
    told = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert outcomes[victim].died == -9
    assert len(set(told)) == 1
    assert told[0].startswith(f"rank {victim} failed: the process died without a word")
