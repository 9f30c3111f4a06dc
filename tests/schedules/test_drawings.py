"""The schedules drawn on a grid, and compared with the pictures that their modules open with."""

from __future__ import annotations

import importlib
import re

import pytest
from making import draw

from fullbore.ir import Action, Schedule
from fullbore.schedules import (
    dualpipe,
    dualpipe_v,
    eager_1f1b,
    gis,
    gis_h,
    gpipe,
    hanayo,
    interleaved,
    looped_bfs,
    one_f_one_b,
    seq1f1b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)


def picture(text: str, *, stage: str = "") -> list[list[str]]:
    """A drawing as cells: `rank 0` and everything in brackets is left out."""
    rows = [line.split("(")[0] for line in text.splitlines() if re.match(r"\s*rank [0-9]", line)]
    return [
        [cell if cell == "--" or not stage else stage.format(rank) + cell for cell in cells]
        for rank, cells in enumerate([c for c in row.split()[2:] if c != "|"] for row in rows)
    ]


# The module, its schedule, and whether its picture leaves the stage out because it is the rank.
PICTURES = [
    ("gpipe", gpipe(ranks=3, microbatches=3), "{}"),
    ("one_f_one_b", one_f_one_b(ranks=3, microbatches=4), "{}"),
    ("interleaved", interleaved(ranks=2, microbatches=4, virtual_stages=2), ""),
    ("looped_bfs", looped_bfs(ranks=2, microbatches=2, virtual_stages=2), ""),
    ("eager_1f1b", eager_1f1b(ranks=3, microbatches=4), "{}"),
    ("zb_h1", zb_h1(ranks=3, microbatches=4), "{}"),
    ("zb_h2", zb_h2(ranks=3, microbatches=6), "{}"),
    ("seq1f1b", seq1f1b(ranks=2, microbatches=2, slices=2), "{}"),
]

# The same where a rank has two stages, the second one in small letters; and how many slots a whole
# backward takes.
TWO_STAGES = [
    ("gis", gis(ranks=2, microbatches=4, virtual_stages=2), 1),
    ("gis_h", gis_h(ranks=4, microbatches=2, virtual_stages=2), 1),
    ("zb_v", zb_v(ranks=2, microbatches=4), 1),
    ("v_half", v_half(ranks=3, microbatches=3), 1),
    ("v_min", v_min(ranks=3, microbatches=3), 1),
    ("hanayo", hanayo(ranks=3, microbatches=3, virtual_stages=2), 2),
    ("dualpipe_v", dualpipe_v(ranks=2, microbatches=4), 2),
    ("dualpipe", dualpipe(ranks=4, microbatches=4), 2),
]


@pytest.mark.parametrize(("module", "schedule", "stage"), PICTURES)
def test_each_module_opens_with_a_true_picture(module: str, schedule, stage: str) -> None:
    text = importlib.import_module(f"fullbore.schedules.{module}").__doc__
    assert draw(schedule) == picture(text, stage=stage)


def in_letters(cell: str, stages: tuple[int, ...]) -> str:
    """A cell without its stage: the rank's first one in large letters, its second in small ones."""
    if cell == "--":
        return cell
    action = Action.parse(cell)
    kind = action.kind.name if action.stage == stages[0] else action.kind.name.lower()
    return f"{kind}{action.microbatch}"


@pytest.mark.parametrize(("module", "schedule", "backward"), TWO_STAGES)
def test_each_module_with_two_stages_a_rank_opens_with_a_true_picture(
    module: str, schedule: Schedule, backward: int
) -> None:
    text = importlib.import_module(f"fullbore.schedules.{module}").__doc__
    drawn = [
        [in_letters(cell, schedule.placement.stages_of(rank)) for cell in row]
        for rank, row in enumerate(draw(schedule, backward=backward))
    ]
    assert drawn == picture(text)


def test_gpipe_drawn_with_backwards_twice_as_long() -> None:
    assert draw(gpipe(ranks=2, microbatches=2), backward=2) == picture(
        """
        rank 0  0F0 0F1 --  --  --  0B0 0B0 0B1 0B1
        rank 1  --  1F0 1F1 1B0 1B0 1B1 1B1 --  --
        """
    )


def test_1f1b_on_four_ranks_drawn_with_backwards_twice_as_long() -> None:
    assert draw(one_f_one_b(ranks=4, microbatches=5), backward=2) == picture(
        """
        rank 0  F0 F1 F2 F3 -- -- -- -- -- -- B0 B0 F4 B1 B1 -- B2 B2 -- B3 B3 -- B4 B4
        rank 1  -- F0 F1 F2 -- -- -- -- B0 B0 F3 B1 B1 F4 B2 B2 -- B3 B3 -- B4 B4 -- --
        rank 2  -- -- F0 F1 -- -- B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 -- B4 B4 -- -- -- --
        rank 3  -- -- -- F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 -- -- -- -- -- --
        """,
        stage="{}",
    )


def test_interleaved_on_four_ranks_drawn() -> None:
    assert draw(interleaved(ranks=4, microbatches=4, virtual_stages=2)) == picture(
        """
    rank 0  0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3  --  --  -- 4B0  -- 4B1  -- 4B2  -- 4B3 0B0 0B1 0B2 0B3
    rank 1   -- 1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3  -- 5B0  -- 5B1  -- 5B2  -- 5B3 1B0 1B1 1B2 1B3  --
    rank 2   --  -- 2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1  -- 6B2  -- 6B3 2B0 2B1 2B2 2B3  --  --
    rank 3   --  --  -- 3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3B0 3B1 3B2 3B3  --  --  --
        """
    )


def test_interleaved_with_a_short_last_group_drawn() -> None:
    assert draw(interleaved(ranks=2, microbatches=3, virtual_stages=2)) == picture(
        """
        rank 0  0F0 0F1 2F0 2F1 0F2 2B0  -- 2B1 2F2 0B0 0B1  -- 2B2  -- 0B2
        rank 1   -- 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2  -- 1B2  --
        """
    )


def test_looped_bfs_with_fewer_microbatches_than_ranks_drawn() -> None:
    assert draw(looped_bfs(ranks=3, microbatches=1, virtual_stages=2)) == picture(
        """
        rank 0  0F0 --  --  3F0 --  --  --  --  3B0 --  --  0B0
        rank 1  --  1F0 --  --  4F0 --  --  4B0 --  --  1B0 --
        rank 2  --  --  2F0 --  --  5F0 5B0 --  --  2B0 --  --
        """
    )


def test_one_rank_runs_alternately_without_idle_slots() -> None:
    assert draw(one_f_one_b(ranks=1, microbatches=3)) == [
        ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    ]
