"""Sends and receives: where they stand, and that nothing else changes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from making import (
    RECV_B,
    RECV_F,
    SEND_F,
    programs_of,
    random_schedule,
    runs,
    schedule_of,
    takes_in_order,
)

from fullbore.ir import Action, Kind, Schedule
from fullbore.passes import (
    PASSES,
    insert_communication,
    recompute_ahead,
    split_backward,
    strip_communication,
)
from fullbore.schedules import build, gpipe, interleaved, one_f_one_b

random_schedules = st.builds(
    lambda seed, ranks, extra, microbatches, split: random_schedule(
        seed, ranks=ranks, stages=ranks + extra, microbatches=microbatches, split=split
    ),
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 4),
    extra=st.integers(0, 4),
    microbatches=st.integers(1, 4),
    split=st.sampled_from([0.0, 0.5, 1.0]),
)


def test_1f1b_on_two_ranks() -> None:
    assert str(insert_communication(one_f_one_b(ranks=2, microbatches=2))) == (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )


def test_wrap_around_messages_share_the_link_of_two_ranks() -> None:
    assert str(insert_communication(interleaved(ranks=2, microbatches=1, virtual_stages=2))) == (
        "rank 0: 0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0\n"
        "rank 1: 1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0"
    )


def test_one_rank_has_no_messages() -> None:
    schedule = interleaved(ranks=1, microbatches=3, virtual_stages=4)
    assert insert_communication(schedule) == schedule


def test_stages_on_one_rank_hand_over_without_a_message() -> None:
    in_a_v = schedule_of(
        "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=[0, 1, 1, 0], microbatches=1
    )
    assert str(insert_communication(in_a_v)) == (
        "rank 0: 0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0\n"
        "rank 1: 1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0"
    )


def test_a_message_needed_early_takes_those_sent_before_it_along() -> None:
    swapped = schedule_of("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1", placement=[0, 1], microbatches=2)
    assert str(insert_communication(swapped)).splitlines()[1] == (
        "rank 1: 1RECV_F0 1RECV_F1 1F1 1F0 1B0 1SEND_B0 1B1 1SEND_B1"
    )


def test_the_gradient_leaves_after_the_input_half_of_a_split_backward() -> None:
    split = split_backward(gpipe(ranks=2, microbatches=1), delay=3)
    assert str(insert_communication(split)).splitlines()[1] == (
        "rank 1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0"
    )


@given(random_schedules)
def test_nothing_else_changes(schedule: Schedule) -> None:
    channelled = insert_communication(schedule)
    assert strip_communication(channelled) == schedule
    assert channelled.placement == schedule.placement
    assert insert_communication(channelled) == channelled
    assert strip_communication(schedule) == schedule


@given(random_schedules)
def test_every_message_is_there_once_in_order_and_all_can_run(schedule: Schedule) -> None:
    channelled = insert_communication(schedule)
    home = schedule.placement.stage_to_rank
    crossings = sum(a != b for a, b in pairwise(home))
    kinds = [action.kind for program in programs_of(channelled) for action in program]
    for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B):
        assert kinds.count(kind) == crossings * schedule.microbatches
    assert takes_in_order(channelled)
    assert runs(channelled)


@given(random_schedules)
def test_a_send_follows_its_compute_and_a_receive_stands_as_late_as_it_can(
    schedule: Schedule,
) -> None:
    channelled = insert_communication(schedule)
    home = schedule.placement.stage_to_rank
    for rank, program in enumerate(programs_of(channelled)):
        following: dict[int, list[Action]] = defaultdict(list)
        for before, action, after in zip(
            [None, *program], program, [*program[1:], None], strict=False
        ):
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                kinds = (Kind.F,) if action.kind == SEND_F else (Kind.B, Kind.I)
                assert before in [replace(action, kind=kind) for kind in kinds]
            if action.kind in (RECV_F, RECV_B):
                source = home[action.stage + (-1 if action.kind == RECV_F else 1)]
                following[source].append(action)
                consumes = (Kind.F,) if action.kind == RECV_F else (Kind.B, Kind.I)
                is_needed_now = after in [replace(action, kind=kind) for kind in consumes]
                is_in_the_way = after is not None and after.kind in (RECV_F, RECV_B)
                assert is_needed_now or is_in_the_way, f"{action} on rank {rank}"


def test_what_is_missing_stays_missing() -> None:
    schedule = one_f_one_b(ranks=2, microbatches=2)
    without = replace(
        schedule,
        programs=(
            schedule.programs[0].select(~(schedule.programs[0].microbatch == 1)),
            schedule.programs[1],
        ),
    )
    assert str(insert_communication(without)) == (
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1"
    )


def test_the_list_of_passes_makes_a_runnable_schedule_of_any() -> None:
    for name in ("gpipe", "interleaved"):
        schedule = build(name, ranks=3, microbatches=4)
        for start in (schedule, insert_communication(schedule)):
            made = start
            for step in PASSES:
                assert step.name
                assert step.summary
                made = step.apply(made)
            assert made == insert_communication(recompute_ahead(split_backward(schedule)))
