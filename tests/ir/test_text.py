"""PyTorch's CSV: written, read again, and garbage refused with line and column."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import random_schedule

from fullbore.errors import NotationError
from fullbore.ir import MOST_RANKS, Action, Kind, Placement, Program, Schedule, from_text, to_text
from fullbore.passes import insert_communication
from fullbore.schedules import build, dualpipe, gpipe, interleaved


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
@pytest.mark.parametrize("channelled", [False, True])
def test_files_travel(tmp_path: Path, name: str, channelled: bool) -> None:
    schedule = build(name, ranks=4, microbatches=6)
    schedule = insert_communication(schedule) if channelled else schedule
    schedule.to_csv(tmp_path / "mine.csv")
    read = Schedule.from_csv(tmp_path / "mine.csv")
    assert read == schedule
    assert read.placement == schedule.placement
    assert read.name == "mine"


def test_slices_of_sequences_travel() -> None:
    schedule = build("seq1f1b", ranks=2, microbatches=2, slices=2)
    text = to_text(schedule)
    assert text.startswith("2SLICES,0F0,0F1,0F2,0B1,") and "\r\n2SLICES,1F0," in text
    assert from_text(text) == schedule
    assert from_text(text.replace("\r\n2SLICES,", "\n", 1)).slices == 2
    assert from_text(text.replace("2SLICES", "")).slices == 1


def test_the_format_is_a_row_a_rank() -> None:
    assert to_text(gpipe(ranks=2, microbatches=1)) == "0F0,0B0\r\n1F0,1B0\r\n"


@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 4),
    extra=st.integers(0, 4),
    microbatches=st.integers(1, 3),
    channelled=st.booleans(),
)
def test_any_lawful_schedule_is_read_as_it_was_written(
    seed: int, ranks: int, extra: int, microbatches: int, channelled: bool
) -> None:
    schedule = random_schedule(
        seed, ranks=ranks, stages=ranks + extra, microbatches=microbatches, split=0.5
    )
    schedule = insert_communication(schedule) if channelled else schedule
    assert from_text(to_text(schedule)) == schedule


@st.composite
def unlawful(draw: st.DrawFn) -> Schedule:
    """Actions of all kinds in any order; each rank computes a stage of its own, without gaps."""
    ranks = draw(st.integers(1, 3))
    numbers = st.integers(0, ranks - 1)
    cell = st.builds(Action, stage=numbers, kind=st.sampled_from(Kind), microbatch=st.just(0))
    rows = [
        [Action(stage=rank, kind=Kind.F, microbatch=0)] * 20 + draw(st.lists(cell, max_size=6))
        for rank in range(ranks)
    ]
    return Schedule(
        name="unlawful",
        microbatches=1,
        placement=Placement.looped(ranks=ranks),
        programs=tuple(Program.of(draw(st.permutations(row))) for row in rows),
    )


@given(unlawful())
def test_unlawful_schedules_are_read_too_for_the_verifier_to_judge(schedule: Schedule) -> None:
    assert from_text(to_text(schedule)) == schedule


@given(st.data())
def test_idle_cells_blanks_and_line_ends_mean_nothing(data: st.DataObject) -> None:
    schedule = interleaved(ranks=2, microbatches=2, virtual_stages=2)
    blank = st.sampled_from(["", " ", "  "])
    lines = []
    for program in schedule.programs:
        cells = []
        for action in program:
            cells += [data.draw(blank)] * data.draw(st.integers(0, 2))
            cells.append(data.draw(blank) + str(action) + data.draw(blank))
        lines.append(",".join(cells))
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    tail = data.draw(st.sampled_from(["", end, end * 3, f"{end},,{end}"]))
    mark = data.draw(st.sampled_from(["", "\ufeff"]))
    assert from_text(mark + end.join(lines) + tail) == schedule


def test_pytorchs_sharding_is_dropped_and_its_overlapped_pairs_are_opened() -> None:
    text = "0UNSHARD,0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD,0RESHARD\n"
    assert str(from_text(text).programs[0]) == "0F0 0F1 0F2 0B0 0B1 0B2"


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("0F0,0B0\n1F0,oops,1B0\n", "line 2, column 2", "'oops' is not an action"),
        ("0F0,,0X0", "line 1, column 3", "'0X0' is not an action"),
        ("0F0,0B0,0F", "line 1, column 3", "'0F' is not an action"),
        ('0F0,"0B0', "line 1, column 2", "not an action"),
        ("0F1000000000,0B0", "line 1, column 1", "up to 9 digits"),
        ("0F0;0B0", "line 1, column 1", "such as 2F0"),
        ("0F0,(0F1;1Q1)OVERLAP_F_B", "line 1, column 2", "'1Q1' is not an action"),
        ("0F0,(0F1)WHATEVER", "line 1, column 2", "not an action"),
        ("\n\n0F0", "line 1, column 1", "rank 0 has no action"),
        ("0F0,0B0\n\n1F0,1B0", "line 2, column 1", "rank 1 has no action"),
        ("0F0,0B0\n0UNSHARD\n1F0,1B0", "line 2, column 1", "rank 1 has no action"),
        ("0F0,0B0\n2F0,2B0", "line 2, column 1", "stage 2 is here, but stage 1 is nowhere"),
        ("0F0,,0F7,0B0,0B7", "line 1, column 3", "microbatch 7 is here, but microbatch 1 is"),
        ("0F0,0B0,999999999F0", "line 1, column 3", "stage 1 is nowhere"),
        ("0F0,0B0\n0F0", "line 2, column 1", "rank 1 computes no stage of its own"),
        ("0F0,0B0\n1SEND_F0", "line 2, column 1", "rank 1 computes no stage of its own"),
        ("3SLICES,0F0,0F1,0B1,0B0", "line 1, column 1", "no sequences of 3"),
        ("2SLICES,0F0,0F1,0B1,0B0\n1SLICES,1F0,1F1,1B1,1B0", "line 2, column 1", "one number"),
        ("0SLICES,0F0,0B0", "line 1, column 1", "'0SLICES' is not an action"),
    ],
)
def test_garbage_is_refused_with_line_and_column(text: str, place: str, said: str) -> None:
    with pytest.raises(NotationError) as error:
        from_text(text)
    assert place in str(error.value)
    assert said in str(error.value)


def test_what_is_no_text_is_refused_with_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_bytes(b"0F0,0B0\n1F0,\xff1B0\n")
    with pytest.raises(NotationError, match="line 2, column 2 is not text"):
        Schedule.from_csv(tmp_path / "odd.csv")


@pytest.mark.parametrize("text", ["", "\n", " , ,\n\n", "\ufeff"])
def test_nothing_is_refused(text: str) -> None:
    with pytest.raises(NotationError, match="empty"):
        from_text(text)


@given(st.text(alphabet='0123FBIWSEND_RCV,;()\r\n "x', max_size=40))
def test_text_is_a_schedule_or_a_notation_error(text: str) -> None:
    try:
        schedule = from_text(text)
    except NotationError:
        return
    assert from_text(to_text(schedule)) == schedule


@given(st.binary(max_size=60))
def test_bytes_are_a_schedule_or_a_notation_error(tmp_path_factory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("csv") / "any.csv"
    path.write_bytes(content)
    try:
        Schedule.from_csv(path)
    except NotationError:
        return


def test_a_missing_file_is_a_notation_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(NotationError, match=r"nowhere\.csv"):
        Schedule.from_csv(tmp_path / "nowhere.csv")
    with pytest.raises(NotationError, match="cannot read"):
        Schedule.from_csv(tmp_path)


def test_a_hundred_thousand_actions_travel() -> None:
    schedule = interleaved(ranks=64, microbatches=256, virtual_stages=4)
    read = from_text(to_text(schedule))
    assert read == schedule
    assert read.programs[0].kind.dtype == np.int8


def test_more_ranks_than_are_supported_are_refused() -> None:
    text = "\n".join(f"{rank}F0,{rank}B0" for rank in range(MOST_RANKS + 1))
    with pytest.raises(NotationError, match=f"^line {MOST_RANKS + 1}, column 1: a row a rank"):
        from_text(text)
    assert from_text(text.rpartition("\n")[0]).ranks == MOST_RANKS


def test_garbage_that_would_be_a_huge_schedule_is_refused() -> None:
    diagonal = ",".join(f"{number}F{number}" for number in range(8000))
    with pytest.raises(NotationError, match=r"^line 1, column 8000: 8000 stages and 8000 microb"):
        from_text(diagonal)


def test_only_line_ends_end_a_row() -> None:
    with pytest.raises(NotationError, match=r"line 1, column 2: '0B0\\x0b1F0' is not an action"):
        from_text("0F0,0B0\v1F0,1B0")
    assert from_text("0F0,0B0\r1F0,1B0\r\n").ranks == 2


def test_a_model_that_is_there_twice_is_seen() -> None:
    for microbatches in (2, 5, 9):
        schedule = dualpipe(ranks=4, microbatches=microbatches)
        assert from_text(to_text(schedule)) == schedule
