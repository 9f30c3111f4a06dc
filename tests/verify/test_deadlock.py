"""Deadlocks: which action each stuck rank waits for, and on whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from making import programs_of, schedule_of, with_programs

from fullbore.passes import insert_communication
from fullbore.schedules import looped_bfs, one_f_one_b
from fullbore.verify import verify
from fullbore.verify.kernels import compiled, walk_programs
from fullbore.verify.walk import walk


def test_two_ranks_that_wait_for_each_other() -> None:
    schedule = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", placement=[0, 1], microbatches=2)
    assert [str(violation) for violation in verify(schedule)] == [
        "rank 0, index 1, 0B0: finishes: waits for ever for 1B0 of rank 1, which stands at "
        "index 1, 1F1, and waits itself (in a circle: rank 0 -> 1 -> 0); on rank 1, move 1B0 "
        "before 1F1, or move this action back",
        "rank 1, index 1, 1F1: finishes: waits for ever for 0F1 of rank 0, which stands at "
        "index 1, 0B0, and waits itself (in a circle: rank 1 -> 0 -> 1); on rank 0, move 0F1 "
        "before 0B0, or move this action back",
    ]


def test_the_same_with_communication() -> None:
    schedule = schedule_of(
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        placement=[0, 1],
        microbatches=2,
    )
    found = verify(schedule)
    assert [(v.rank, v.index, str(v.action), v.rule) for v in found] == [
        (0, 2, "0RECV_B0", "finishes"),
        (1, 2, "1RECV_F1", "finishes"),
    ]
    assert "waits for ever for 1SEND_B0 of rank 1" in found[0].detail


def test_following_the_remedy_helps() -> None:
    schedule = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", placement=[0, 1], microbatches=2)
    assert "on rank 1, move 1B0 before 1F1" in verify(schedule)[0].remedy
    programs = programs_of(schedule)
    programs[1][1], programs[1][2] = programs[1][2], programs[1][1]
    assert verify(with_programs(schedule, programs)) == []


def test_ranks_outside_the_circle_are_stuck_too_and_name_it() -> None:
    schedule = schedule_of(
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1",
        "2F0 2F1 2B0 2B1",
        placement=[0, 1, 2],
        microbatches=2,
    )
    found = verify(schedule)
    assert [(v.rank, str(v.action)) for v in found] == [(0, "0B0"), (1, "1B0"), (2, "2F1")]
    assert "(in a circle: rank 1 -> 2 -> 1)" in found[0].detail


def test_ranks_that_finish_are_not_reported() -> None:
    schedule = schedule_of(
        "0F0 0F1 2F0 2F1 2B1 0B1 2B0 0B0",
        "1F0 1F1 3F0 3F1 3B0 1B0 3B1 1B1",
        "4F0 4F1 4B0 4B1",
        placement=[0, 1, 0, 1, 2],
        microbatches=2,
    )
    found = verify(schedule)
    assert [(v.rank, str(v.action)) for v in found] == [(0, "2B1"), (1, "1B0")]


def test_a_thousand_ranks_lead_into_one_circle() -> None:
    ranks = 1000
    fine = one_f_one_b(ranks=ranks, microbatches=ranks)
    last = fine.programs[-1]
    late = last.select(np.argsort(last.kind, kind="stable"))  # all forwards, then all backwards
    found = verify(replace(fine, programs=(*fine.programs[:-1], late)))
    assert len(found) == ranks
    assert "(in a circle: rank 998 -> 999 -> 998)" in found[0].detail


def test_a_long_circle_is_counted_not_listed() -> None:
    rows = [f"{r}F0 {r + 20}F0 {r + 20}B0 {r}B0" for r in range(20)]
    rows[0] = "20F0 0F0 20B0 0B0"
    found = verify(schedule_of(*rows, placement=[*range(20), *range(20)], microbatches=1))
    assert len(found) == 20
    assert all("(a circle of 20 ranks)" in violation.detail for violation in found)


def test_looped_bfs_needs_sends_that_do_not_block() -> None:
    schedule = looped_bfs(ranks=2, microbatches=6, virtual_stages=2)
    assert verify(schedule) == []
    found = verify(schedule, blocking_sends=True)
    assert {v.rule for v in found} == {"finishes"}
    assert {v.rank for v in found} == {0, 1}
    assert all("let sends overlap" in v.remedy for v in found)
    for violation in found:  # the index is that of the send's own compute action
        action = schedule.programs[violation.rank][violation.index]
        assert (action.stage, action.microbatch) == (
            violation.action.stage,
            violation.action.microbatch,
        )


def test_with_communication_the_index_is_that_of_the_send() -> None:
    schedule = insert_communication(looped_bfs(ranks=2, microbatches=6, virtual_stages=2))
    found = verify(schedule, blocking_sends=True)
    assert found
    for violation in found:
        assert schedule.programs[violation.rank][violation.index] == violation.action


def test_few_microbatches_fit_into_the_windows_of_blocking_sends() -> None:
    for microbatches in (1, 2, 3, 4, 5):
        schedule = looped_bfs(ranks=2, microbatches=microbatches, virtual_stages=2)
        assert verify(schedule, blocking_sends=True) == []


@pytest.mark.parametrize("stuck", [False, True])
def test_the_compiled_walk_is_the_plain_one(stuck: bool) -> None:
    schedule = one_f_one_b(ranks=3, microbatches=4)
    flat = schedule.flat()
    rank = flat.rank.tolist()
    needs = np.full(schedule.actions, -1, dtype=np.int64)
    needs[flat.offsets[1]] = 0
    if stuck:
        needs[0] = flat.offsets[1] + 1
    plain = walk(flat, needs)
    needer, home = (np.full(schedule.actions, -1, dtype=np.int64) for _ in range(2))
    for index, needed in enumerate(needs.tolist()):
        if needed >= 0:
            needer[needed], home[index] = rank[index], rank[needed]
    reached, order = flat.offsets[:-1].copy(), np.full(schedule.actions, -1, dtype=np.int64)
    compiled(walk_programs)(
        flat.offsets,
        needs,
        home,
        needer,
        reached,
        order,
        np.full(3, -1, dtype=np.int64),
        np.arange(3)[::-1].copy(),
    )
    assert reached.tolist() == plain.reached.tolist()
    assert order[order >= 0].tolist() == plain.order.tolist()
    assert (len(plain.order) < schedule.actions) == stuck
