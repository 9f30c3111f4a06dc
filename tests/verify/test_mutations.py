"""Every single change that breaks a correct schedule is caught, and no other change is.

Whether a reordered schedule still runs is decided by sorting its whole dependency graph with the
standard library, from the definition of a pipeline spelled out in `making`; never by the verifier.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import Action, programs_of, random_schedule, runs, with_programs

from fullbore.ir import Kind, Schedule
from fullbore.passes import insert_communication, offload, split_backward
from fullbore.schedules import (
    build,
    dualpipe,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    seq1f1b,
    zb_v,
)
from fullbore.verify import Violation, verify

SMALL = [
    gpipe(ranks=2, microbatches=2),
    one_f_one_b(ranks=3, microbatches=2),
    interleaved(ranks=2, microbatches=2, virtual_stages=2),
    looped_bfs(ranks=2, microbatches=2, virtual_stages=2),
    split_backward(one_f_one_b(ranks=2, microbatches=3), delay=2),
    zb_v(ranks=2, microbatches=1),
    dualpipe(ranks=2, microbatches=2),
    seq1f1b(ranks=2, microbatches=1, slices=2),
    random_schedule(7, ranks=3, stages=5, microbatches=2, split=0.5),
    offload(one_f_one_b(ranks=3, microbatches=3), ahead=0),
    random_schedule(8, ranks=2, stages=3, microbatches=2, split=0.5, away=0.6),
]
ALL = [version for small in SMALL for version in (small, insert_communication(small))]
NAMES = [
    f"{s.name}{'-split' * s.splits_backward}{'-away' * s.offloads}{'-comms' * s.has_communication}"
    for s in ALL
]
every_small = pytest.mark.parametrize("schedule", ALL, ids=NAMES)


def cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, program in enumerate(programs_of(schedule)):
        for index, action in enumerate(program):
            yield rank, index, action


def places(schedule: Schedule, rank: int) -> range:
    """Where an action can be put into a program; every third place of the longer ones."""
    return range(0, len(schedule.programs[rank]) + 1, 3 if schedule.has_communication else 1)


def dropped(schedule: Schedule, rank: int, index: int) -> Schedule:
    programs = programs_of(schedule)
    del programs[rank][index]
    return with_programs(schedule, programs)


def inserted(schedule: Schedule, rank: int, index: int, action: Action) -> Schedule:
    programs = programs_of(schedule)
    programs[rank].insert(index, action)
    return with_programs(schedule, programs)


def swapped(schedule: Schedule, rank: int, one: int, other: int) -> Schedule:
    programs = programs_of(schedule)
    program = programs[rank]
    program[one], program[other] = program[other], program[one]
    return with_programs(schedule, programs)


def assert_well_told(violations: list[Violation], schedule: Schedule) -> None:
    """Each names a rank, an index that holds the action (or that it is missing), and a remedy."""
    assert violations
    programs = programs_of(schedule)
    for violation in violations:
        assert violation.rule
        assert violation.remedy
        assert violation.detail
        if violation.index is None:
            assert "missing" in violation.detail
        else:
            assert programs[violation.rank][violation.index] == violation.action
        assert str(violation.action) in str(violation)
        assert f"rank {violation.rank}" in str(violation)


@every_small
def test_every_drop_is_caught(schedule: Schedule) -> None:
    for rank, index, action in cells(schedule):
        broken = dropped(schedule, rank, index)
        found = verify(broken)
        assert_well_told(found, broken)
        assert any(action.stage == v.action.stage for v in found)


@every_small
def test_every_duplicate_is_caught_wherever_it_stands(schedule: Schedule) -> None:
    for rank, _, action in cells(schedule):
        for place in places(schedule, rank):
            broken = inserted(schedule, rank, place, action)
            found = verify(broken)
            assert_well_told(found, broken)
            assert any(v.action == action and "second time" in v.detail for v in found)


@every_small
def test_every_move_to_another_rank_is_caught_wherever_it_goes(schedule: Schedule) -> None:
    for rank, index, action in cells(schedule):
        rest = dropped(schedule, rank, index)
        for other in range(schedule.ranks):
            for place in places(rest, other):
                if other != rank:
                    broken = inserted(rest, other, place, action)
                    found = verify(broken)
                    assert_well_told(found, broken)
                    assert any(v.rule == "placed" and v.action == action for v in found)


@every_small
def test_every_swap_is_caught_exactly_if_it_breaks_something(schedule: Schedule) -> None:
    broke = kept = 0
    for rank, program in enumerate(schedule.programs):
        for one in range(len(program)):
            for other in range(max(0, one - 8), one):
                changed = swapped(schedule, rank, one, other)
                found = verify(changed)
                assert runs(changed) == (not found), f"rank {rank}, {other} <-> {one}: {found}"
                if found:
                    assert_well_told(found, changed)
                broke, kept = broke + bool(found), kept + (not found)
    assert broke > kept


@every_small
def test_every_change_of_kind_stage_or_microbatch_is_caught(schedule: Schedule) -> None:
    for rank, index, action in cells(schedule):
        for other in (
            *(replace(action, kind=kind) for kind in Kind),
            *(replace(action, stage=stage) for stage in (*range(schedule.stages), 99)),
            *(replace(action, microbatch=m) for m in (*range(schedule.microbatches), 99)),
        ):
            if other != action:
                broken = inserted(dropped(schedule, rank, index), rank, index, other)
                assert_well_told(verify(broken), broken)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Schedule, bool]:
    """A correct schedule with one change, and whether it can still run."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "looped-bfs"]))
    schedule = build(name, ranks=draw(st.integers(2, 5)), microbatches=draw(st.integers(1, 8)))
    if draw(st.booleans()):
        schedule = split_backward(schedule, delay=draw(st.integers(0, 6)))
    if draw(st.booleans()):
        schedule = offload(schedule, ahead=draw(st.integers(0, 3)))
    if draw(st.booleans()):
        schedule = insert_communication(schedule)
    rank, index, action = draw(st.sampled_from(list(cells(schedule))))
    length = len(schedule.programs[rank])
    match draw(st.sampled_from(["drop", "swap", "duplicate", "move"])):
        case "drop":
            return dropped(schedule, rank, index), False
        case "duplicate":
            return inserted(schedule, rank, draw(st.integers(0, length)), action), False
        case "move":
            other = draw(st.sampled_from([r for r in range(schedule.ranks) if r != rank]))
            place = draw(st.integers(0, len(schedule.programs[other])))
            return inserted(dropped(schedule, rank, index), other, place, action), False
        case _:
            changed = swapped(schedule, rank, index, draw(st.integers(0, length - 1)))
            return changed, runs(changed)


@pytest.mark.slow
@settings(max_examples=400)
@given(mutated())
def test_any_change_to_any_schedule_is_caught_exactly_if_it_breaks_something(
    case: tuple[Schedule, bool],
) -> None:
    schedule, still_runs = case
    found = verify(schedule)
    assert (not found) == still_runs
    if found:
        assert_well_told(found, schedule)


@settings(max_examples=300)
@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(2, 4),
    st.integers(0, 3),
    st.booleans(),
)
def test_shuffled_programs_are_judged_exactly(
    seed: int, order: int, ranks: int, extra: int, channelled: bool
) -> None:
    """A lawful schedule, some of whose programs are replaced by shuffled ones."""
    one = random_schedule(seed, ranks=ranks, stages=ranks + extra, microbatches=3, split=0.0)
    other = shuffled(one, order)
    mixed = replace(
        one,
        programs=tuple(
            (one if (order >> rank) & 1 else other).programs[rank] for rank in range(ranks)
        ),
    )
    mixed = insert_communication(mixed) if channelled and runs(mixed) else mixed
    assert runs(mixed) == (verify(mixed) == [])


def shuffled(schedule: Schedule, seed: int) -> Schedule:
    """Each program shuffled by itself, keeping each stage and microbatch's F before its B."""
    dice = random.Random(seed)
    programs = programs_of(schedule)
    for program in programs:
        for _ in range(4 * len(program)):
            at = dice.randrange(len(program) - 1)
            one, other = program[at : at + 2]
            if (one.stage, one.microbatch) != (other.stage, other.microbatch):
                program[at], program[at + 1] = other, one
    return with_programs(schedule, programs)
