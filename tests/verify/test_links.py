"""What links must carry, against every state that an execution can reach."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import (
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    needs_of,
    programs_of,
    random_schedule,
    schedule_of,
)

from fullbore.errors import VerificationError
from fullbore.ir import Schedule
from fullbore.passes import insert_communication
from fullbore.schedules import build, gpipe, interleaved, one_f_one_b
from fullbore.verify import LinkUse, clocks, links, window


def link_of(action: Action, schedule: Schedule) -> tuple[int, int] | None:
    """The directed pair of ranks that a send or receive belongs to."""
    home = schedule.placement.stage_to_rank
    here = home[action.stage]
    match action.kind:
        case kind if kind == SEND_F:
            return here, home[action.stage + 1]
        case kind if kind == SEND_B:
            return here, home[action.stage - 1]
        case kind if kind == RECV_F:
            return home[action.stage - 1], here
        case kind if kind == RECV_B:
            return home[action.stage + 1], here
    return None


def furthest_ahead(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Sent and not yet taken, at most, over all states that any execution passes through."""
    programs = programs_of(schedule)
    present = {action for program in programs for action in program}
    where = {a: (rank, i) for rank, program in enumerate(programs) for i, a in enumerate(program)}
    most: dict[tuple[int, int], int] = defaultdict(int)
    seen = {(0,) * len(programs)}
    border = list(seen)
    while border:
        state = border.pop()
        under_way: dict[tuple[int, int], int] = defaultdict(int)
        for rank, program in enumerate(programs):
            for action in program[: state[rank]]:
                link = link_of(action, schedule)
                if link is not None:
                    under_way[link] += 1 if action.kind in (SEND_F, SEND_B) else -1
        for link, count in under_way.items():
            most[link] = max(most[link], count)
        for rank, program in enumerate(programs):
            if state[rank] < len(program):
                needs = [where[n] for n in needs_of(program[state[rank]], schedule, present)]
                following = (*state[:rank], state[rank] + 1, *state[rank + 1 :])
                if all(state[r] > i for r, i in needs) and following not in seen:
                    seen.add(following)
                    border.append(following)
    return dict(most)


def most_held(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Taken and not yet consumed, at most, reading each program from top to bottom."""
    most: dict[tuple[int, int], int] = defaultdict(int)
    present = {action for program in schedule.programs for action in program}
    for program in programs_of(schedule):
        held: dict[tuple[int, int], int] = defaultdict(int)
        for action in program:
            if action.kind in (RECV_F, RECV_B):
                link = link_of(action, schedule)
                held[link] += 1
                most[link] = max(most[link], held[link])
            for need in needs_of(action, schedule, present):
                if need.kind in (RECV_F, RECV_B):
                    held[link_of(need, schedule)] -= 1
    return dict(most)


def returned_by_each(schedule: Schedule) -> dict[tuple[int, int], list[int]]:
    """What each message brings back: how many from its destination its source had taken."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for program in programs_of(schedule):
        taken: dict[tuple[int, int], int] = defaultdict(int)
        for action in program:
            link = link_of(action, schedule)
            if link is not None and action.kind in (RECV_F, RECV_B):
                taken[link] += 1
            elif link is not None:
                found[link].append(taken[link[1], link[0]])
    return dict(found)


def assert_exact(schedule: Schedule) -> None:
    channelled = insert_communication(schedule)
    found = links(schedule)
    assert links(channelled) == found
    assert {(link.source, link.destination): link.ahead for link in found} == furthest_ahead(
        channelled
    )
    assert {(link.source, link.destination): link.held for link in found} == most_held(channelled)
    assert {
        (link.source, link.destination): link.returned.tolist() for link in found
    } == returned_by_each(channelled)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(2, 3),
    extra=st.integers(0, 2),
    microbatches=st.integers(1, 2),
    split=st.sampled_from([0.0, 1.0]),
)
def test_any_schedule_runs_ahead_exactly_as_far_as_said(
    seed: int, ranks: int, extra: int, microbatches: int, split: float
) -> None:
    assert_exact(
        random_schedule(
            seed, ranks=ranks, stages=ranks + extra, microbatches=microbatches, split=split
        )
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 3), (2, 4), (3, 2), (3, 3)])
def test_generated_schedules_run_ahead_exactly_as_far_as_said(
    name: str, ranks: int, microbatches: int
) -> None:
    assert_exact(build(name, ranks=ranks, microbatches=microbatches))


def test_a_causal_chain_through_other_ranks_counts() -> None:
    """Messages go 0 -> 1 only; what rank 1 has taken, rank 0 learns round the ring, by rank 2."""
    assert_exact(interleaved(ranks=3, microbatches=3, virtual_stages=2))
    found = links(interleaved(ranks=3, microbatches=6, virtual_stages=2))
    wrap_around = next(link for link in found if (link.source, link.destination) == (2, 0))
    assert wrap_around.ahead < wrap_around.messages


def test_1f1b_runs_ahead_by_its_warm_up_and_gpipe_by_everything() -> None:
    for link in links(one_f_one_b(ranks=4, microbatches=32)):
        assert link.ahead == 4 - min(link.source, link.destination)
        assert link.messages == 32
    for link in links(gpipe(ranks=4, microbatches=32)):
        assert link.ahead == 32


def test_windows_do_not_grow_with_microbatches() -> None:
    for microbatches in (4, 64):
        for name in ("gpipe", "1f1b", "interleaved", "looped-bfs"):
            for link in links(build(name, ranks=4, microbatches=microbatches)):
                assert 1 <= window(link, ranks=4) <= 4


def test_links_come_by_source_then_destination() -> None:
    found = [
        (link.source, link.destination) for link in links(one_f_one_b(ranks=3, microbatches=1))
    ]
    assert found == [(0, 1), (1, 0), (1, 2), (2, 1)]


def test_the_links_of_one_rank_are_a_part_of_all() -> None:
    schedule = interleaved(ranks=5, microbatches=7, virtual_stages=2)
    every = links(schedule)
    for rank in range(5):
        touching = tuple(link for link in every if rank in (link.source, link.destination))
        assert links(schedule, rank=rank) == touching


def test_one_rank_has_no_links() -> None:
    assert links(interleaved(ranks=1, microbatches=4, virtual_stages=2)) == ()


def test_messages_taken_early_are_held() -> None:
    schedule = schedule_of(
        "0F0 0F1 0F2 0B0 0B1 0B2", "1F2 1F0 1F1 1B0 1B1 1B2", placement=[0, 1], microbatches=3
    )
    use = links(schedule)[0]
    assert use == LinkUse(
        source=0,
        destination=1,
        messages=3,
        ahead=3,
        held=3,
        taken=np.zeros(3, dtype=np.int64),
        returned=np.zeros(3, dtype=np.int64),
    )
    assert use.taken.tolist() == [0, 0, 0]


def test_a_schedule_that_cannot_finish_is_refused() -> None:
    schedule = schedule_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", placement=[0, 1], microbatches=2)
    with pytest.raises(VerificationError, match="cannot finish"):
        links(schedule)


def test_clocks_in_blocks_and_compiled_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = interleaved(ranks=6, microbatches=9, virtual_stages=3)
    whole = links(schedule)
    monkeypatch.setattr(clocks, "BLOCK_VALUES", 40)
    assert links(schedule) == whole
    monkeypatch.setattr(clocks, "COMPILE_FROM_STEPS", 1)
    assert links(schedule) == whole
