"""Every B becomes an I in its place and a W later; nothing else moves."""

import pytest

from fullbore.errors import ScheduleError
from fullbore.ir import Kind
from fullbore.passes import insert_communication, split_backward, strip_communication
from fullbore.schedules import build, one_f_one_b
from fullbore.verify import verify


def test_the_drawing_of_the_module() -> None:
    schedule = one_f_one_b(ranks=2, microbatches=2)
    assert str(split_backward(schedule, delay=1).programs[1]) == "1F0 1I0 1F1 1W0 1I1 1W1"


@pytest.mark.parametrize("delay", [0, 1, 2, 5, 1000])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_the_result_is_lawful_and_without_its_weight_halves_the_same(name: str, delay: int) -> None:
    schedule = build(name, ranks=4, microbatches=8)
    split = split_backward(schedule, delay=delay)
    assert verify(split) == [] and verify(insert_communication(split)) == []
    for before, after in zip(schedule.programs, split.programs, strict=True):
        rest = after.select(after.kind != Kind.W)
        assert str(rest).replace("I", "B") == str(before)
        weights = after.select(after.kind == Kind.W)
        assert list(weights.microbatch) == list(before.microbatch[before.kind == Kind.B])


def test_a_delay_counts_the_actions_of_the_rank_between_the_halves() -> None:
    split = split_backward(one_f_one_b(ranks=4, microbatches=8), delay=3)
    for program in split.programs:
        at = {str(action): i for i, action in enumerate(program)}
        end = len([action for action in program if action.kind != Kind.W])
        for action in program:
            if action.kind == Kind.W:
                name = f"{action.stage}I{action.microbatch}"
                between = list(program)[at[name] + 1 : at[str(action)]]
                passed = [a for a in between if a.kind != Kind.W]
                left = [a for a in list(program)[: at[name]] if a.kind != Kind.W]
                assert len(passed) == min(3, end - 1 - len(left))


def test_a_schedule_that_is_split_already_stays_as_it_is() -> None:
    split = split_backward(one_f_one_b(ranks=2, microbatches=3), delay=1)
    assert split_backward(split, delay=4) == split
    assert split_backward(insert_communication(split)) == strip_communication(split)


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(ScheduleError, match="nearest legal value is 0"):
        split_backward(one_f_one_b(ranks=2, microbatches=2), delay=-1)
