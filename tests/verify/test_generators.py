"""Every generator keeps every law, for hundreds of P, v, M and G, and so does its communication."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from making import random_schedule, runs

from fullbore.ir import Schedule
from fullbore.passes import insert_communication, split_backward
from fullbore.schedules import FAMILIES, Family, build
from fullbore.verify import check, links, verify


@st.composite
def generated(draw: st.DrawFn) -> Schedule:
    """Any family with any P, v, M and G."""
    family = draw(st.sampled_from(FAMILIES))
    ranks = draw(st.integers(1, 7)) if family.name != "dualpipe" else 2 * draw(st.integers(1, 3))
    virtual = draw(st.sampled_from([2, 4] if family.name == "hanayo" else [1, 2, 3, 4]))
    return build(
        family.name,
        ranks=ranks,
        microbatches=draw(st.integers(1, 2 * ranks + 3)),
        virtual_stages=virtual if family.takes_virtual_stages else None,
        microbatch_group_size=draw(st.integers(ranks, 3 * ranks)) if family.takes_group else None,
        slices=draw(st.integers(1, 4)) if family.takes_slices else None,
    )


@pytest.mark.slow
@settings(max_examples=300)
@given(schedule=generated())
def test_every_generator_keeps_every_law(schedule: Schedule) -> None:
    channelled = insert_communication(schedule)
    assert verify(schedule, peak_limit=schedule.microbatches) == []
    assert verify(channelled, peak_limit=schedule.microbatches) == []
    assert runs(schedule)
    assert runs(channelled)


@settings(max_examples=100)
@given(schedule=generated(), delay=st.integers(0, 20))
def test_split_backwards_keep_every_law_too(schedule: Schedule, delay: int) -> None:
    split = split_backward(schedule, delay=delay)
    check(split)
    check(insert_communication(split))


@settings(max_examples=100)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved"]), ranks=st.integers(1, 8), data=st.data()
)
def test_all_but_looped_bfs_run_with_blocking_sends(
    name: str, ranks: int, data: st.DataObject
) -> None:
    schedule = build(name, ranks=ranks, microbatches=data.draw(st.integers(1, 3 * ranks + 2)))
    assert verify(schedule, blocking_sends=True) == []
    assert verify(insert_communication(schedule), blocking_sends=True) == []


@settings(max_examples=100)
@given(schedule=generated())
def test_no_link_is_asked_for_more_than_it_carries(schedule: Schedule) -> None:
    for link in links(schedule):
        assert 1 <= link.ahead <= link.messages
        assert 1 <= link.held <= link.ahead
        assert link.source != link.destination


@given(st.sampled_from(FAMILIES), st.integers(2, 8), st.integers(1, 20))
def test_messages_are_needed_about_in_the_order_in_which_they_are_sent(
    family: Family, ranks: int, microbatches: int
) -> None:
    ranks += ranks % 2 if family.name == "dualpipe" else 0
    schedule = build(family.name, ranks=ranks, microbatches=microbatches)
    held = {link.held for link in links(schedule)}
    assert held == {1} if schedule.virtual_stages == 1 else held <= {1, 2}


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 4),
    extra=st.integers(0, 4),
    microbatches=st.integers(1, 4),
    split=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_lawful_schedules_that_nobody_would_write_pass(
    seed: int, ranks: int, extra: int, microbatches: int, split: float
) -> None:
    schedule = random_schedule(
        seed, ranks=ranks, stages=ranks + extra, microbatches=microbatches, split=split
    )
    check(schedule)
    check(insert_communication(schedule))
