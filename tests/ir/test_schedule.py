"""Programs, placements and schedules as values."""

from __future__ import annotations

import numpy as np
import pytest
from making import act, schedule_of

from fullbore.errors import ScheduleError
from fullbore.ir import Placement, Program
from fullbore.passes import insert_communication
from fullbore.schedules import dualpipe, gpipe, interleaved, one_f_one_b, seq1f1b


def test_a_program_is_a_sequence_of_actions() -> None:
    program = Program.of([act("0F0"), act("2F0"), act("2B0")])
    assert len(program) == 3
    assert program[1] == act("2F0")
    assert list(program) == [act("0F0"), act("2F0"), act("2B0")]
    assert str(program) == "0F0 2F0 2B0"
    assert program.select(np.array([True, False, True])) == Program.of([act("0F0"), act("2B0")])
    assert program.select(np.array([2, 0])) == Program.of([act("2B0"), act("0F0")])


def test_programs_are_equal_and_hash_by_content() -> None:
    one, same, other = (Program.of([act(text)]) for text in ("0F0", "0F0", "0F1"))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "0F0"


def test_schedules_are_equal_whatever_their_names() -> None:
    by_hand = schedule_of("0F0 0B0", placement=[0], microbatches=1)
    assert by_hand == gpipe(ranks=1, microbatches=1) == one_f_one_b(ranks=1, microbatches=1)
    assert gpipe(ranks=2, microbatches=2) != one_f_one_b(ranks=2, microbatches=2)
    assert len({by_hand, gpipe(ranks=1, microbatches=1)}) == 1


def test_what_a_schedule_says_about_itself() -> None:
    schedule = interleaved(ranks=2, microbatches=4, virtual_stages=3)
    assert (schedule.ranks, schedule.stages, schedule.virtual_stages) == (2, 6, 3)
    assert schedule.actions == 2 * 6 * 4
    assert not schedule.has_communication
    assert not schedule.splits_backward
    assert insert_communication(schedule).has_communication
    split = schedule_of("0F0 0I0 0W0", placement=[0], microbatches=1)
    assert split.splits_backward
    assert str(split) == "rank 0: 0F0 0I0 0W0"


def test_flat_joins_the_programs() -> None:
    schedule = schedule_of("0F0 0B0", "1F0 1B0", placement=[0, 1], microbatches=1)
    flat = schedule.flat()
    assert flat.offsets.tolist() == [0, 2, 4]
    assert flat.rank.tolist() == [0, 0, 1, 1]
    assert [str(flat.action(i)) for i in range(4)] == ["0F0", "0B0", "1F0", "1B0"]


def test_looped_placement() -> None:
    placement = Placement.looped(ranks=3, virtual_stages=2)
    assert placement.stage_to_rank == (0, 1, 2, 0, 1, 2)
    assert (placement.ranks, placement.stages) == (3, 6)
    assert placement.stages_of(1) == (1, 4)


@pytest.mark.parametrize("stage_to_rank", [(), (1,), (0, 2), (0, 3, 1)])
def test_a_rank_without_a_stage_is_refused(stage_to_rank: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="holds no stage"):
        Placement(stage_to_rank=stage_to_rank)


def test_v_and_wave_placements() -> None:
    assert Placement.v(ranks=3).stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert Placement.wave(ranks=2, virtual_stages=3).stage_to_rank == (0, 1, 1, 0, 0, 1)
    assert Placement.wave(ranks=3, virtual_stages=1) == Placement.looped(ranks=3)
    assert Placement.v(ranks=3).stages_of(1) == (1, 4)


def test_a_placement_of_two_copies() -> None:
    placement = Placement.both_ways(ranks=3)
    assert placement.tables.tolist() == [[0, 1, 2], [2, 1, 0]]
    assert (placement.ranks, placement.stages) == (3, 3)
    assert [placement.stages_of(rank) for rank in range(3)] == [(0, 2), (1,), (0, 2)]
    with pytest.raises(ScheduleError, match="as many stages as the model"):
        Placement(stage_to_rank=(0, 1), copies=((0,),))


def test_what_is_held_is_counted_in_shares_of_the_model() -> None:
    assert interleaved(ranks=2, microbatches=2, virtual_stages=2).activation_unit == 0.5
    assert seq1f1b(ranks=2, microbatches=2, slices=4).activation_unit == 0.25
    assert dualpipe(ranks=2, microbatches=2).activation_unit == 1
