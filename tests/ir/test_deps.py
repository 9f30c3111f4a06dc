"""The dependency graph, against the definition spelled out action by action."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from making import needs_of, random_schedule, schedule_of

from fullbore.ir import Schedule, dependencies
from fullbore.passes import insert_communication
from fullbore.schedules import one_f_one_b, seq1f1b


def found(schedule: Schedule) -> dict[str, set[str]]:
    """What each action waits for, by name."""
    flat, deps = schedule.flat(), dependencies(schedule)
    return {
        str(flat.action(i)): {
            str(flat.action(int(j))) for j in (deps.value[i], deps.stored[i]) if j >= 0
        }
        for i in range(schedule.actions)
    }


def test_a_small_one_by_hand() -> None:
    schedule = schedule_of("0F0 0I0 0W0", "1F0 1B0", placement=[0, 1], microbatches=1)
    assert found(schedule) == {
        "0F0": set(),
        "0I0": {"0F0", "1B0"},
        "0W0": {"0I0"},
        "1F0": {"0F0"},
        "1B0": {"1F0"},
    }
    assert found(insert_communication(schedule)) == {
        "0F0": set(),
        "0SEND_F0": {"0F0"},
        "1RECV_F0": {"0SEND_F0"},
        "1F0": {"1RECV_F0"},
        "1B0": {"1F0"},
        "1SEND_B0": {"1B0"},
        "0RECV_B0": {"1SEND_B0"},
        "0I0": {"0F0", "0RECV_B0"},
        "0W0": {"0I0"},
    }


@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 3),
    extra=st.integers(0, 3),
    microbatches=st.integers(1, 3),
    split=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_schedule_has_the_dependencies_of_the_definition(
    seed: int, ranks: int, extra: int, microbatches: int, split: float
) -> None:
    made = random_schedule(
        seed, ranks=ranks, stages=ranks + extra, microbatches=microbatches, split=split
    )
    for schedule in (made, insert_communication(made)):
        present = {action for program in schedule.programs for action in program}
        assert found(schedule) == {
            str(action): set(map(str, needs_of(action, schedule, present))) for action in present
        }


def test_what_is_missing_is_minus_one() -> None:
    schedule = schedule_of("0B0", "1F0", placement=[0, 1], microbatches=1)
    deps = dependencies(schedule)
    assert deps.value.tolist() == [-1, -1]
    assert deps.stored.tolist() == [-1, -1]


def test_slices_of_a_sequence_are_chained_on_their_stage() -> None:
    schedule = seq1f1b(ranks=1, microbatches=2, slices=2)
    assert str(schedule.programs[0]) == "0F0 0F1 0B1 0F2 0B0 0F3 0B3 0B2"
    assert dependencies(schedule).carried.tolist() == [-1, 0, -1, -1, 2, 3, -1, 6]
    assert (dependencies(one_f_one_b(ranks=2, microbatches=3)).carried == -1).all()
