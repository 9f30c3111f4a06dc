"""Figures of timelines drawn by hand."""

from __future__ import annotations

import pytest

from fullbore.cost import Costs
from fullbore.ir import Placement, Program, Schedule, from_text
from fullbore.sim import simulate
from fullbore.timeline import summarize

# time     0  1  2  3  4  5  6  7  8  9 10
# rank 0   F0 F1 .. .. B0 B0 .. F2 .. B1 ..     (0B2 never comes: cut short)
# rank 1   .. F0 B0 B0 F1 B1 B1 .. F2 .. B2
ROWS = (
    [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 4, 6), ("0F2", 7, 8), ("0B1", 9, 10)],
    [("1F0", 1, 2), ("1B0", 2, 4), ("1F1", 4, 5), ("1B1", 5, 7), ("1F2", 8, 9), ("1B2", 10, 11)],
)
SCHEDULE = from_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")


def test_every_figure_of_a_drawn_timeline(draw):
    found = summarize(draw(*ROWS), SCHEDULE)
    assert found.makespan_s == 11
    assert found.busy_s == (6, 8)
    assert found.idle_s == (5, 3)
    assert found.warmup_idle_s == (2, 1)  # 2-4; 0-1
    assert found.steady_idle_s == (1, 1)  # 6-7; 7-8
    assert found.cooldown_idle_s == (2, 1)  # 8-9 and 10-11; 9-10
    assert found.imbalance_s == (2, 0)
    assert found.bubble_fraction == 8 / 22
    assert found.bubble_overhead == 8 / 14
    assert found.span_bubble_fraction == pytest.approx(1 - 14 / 20)  # 0-10 and 1-11 are 10 long
    assert found.peak_activations == (2, 1)


def test_messages_are_neither_busy_nor_makespan(draw):
    sends = [("0SEND_F0", 1, 3), ("0RECV_B0", 2, 4), ("0SEND_F2", 8, 20)]
    merged = sorted(ROWS[0] + sends, key=lambda span: span[1])
    assert summarize(draw(merged, ROWS[1]), SCHEDULE) == summarize(draw(*ROWS), SCHEDULE)


def test_forwards_alone_have_no_backward_to_warm_up_for(draw):
    # Evaluation: warming up lasts until the last forward, and only the end is cool-down.
    found = summarize(
        draw([("0F0", 0, 1), ("0F1", 2, 3)], [("1F0", 1, 2), ("1F1", 3, 4)]),
        from_text("0F0,0F1\n1F0,1F1"),
    )
    assert found.warmup_idle_s == (1, 2)
    assert found.steady_idle_s == (0, 0)
    assert found.cooldown_idle_s == (1, 0)
    assert found.peak_activations == (2, 2)


def test_the_backward_that_ends_warm_up_is_the_input_gradient(draw):
    # F ends at 1, I runs 2-3, W 5-6: one second of warm-up, two behind the last forward.
    found = summarize(draw([("0F0", 0, 1), ("0I0", 2, 3), ("0W0", 5, 6)]), from_text("0F0,0I0,0W0"))
    assert found.warmup_idle_s == (1,)
    assert found.cooldown_idle_s == (2,)


def test_late_ranks_have_a_shorter_span_than_makespan(draw):
    # Both ranks work without a pause, one second apart: no bubble in their spans.
    found = summarize(
        draw([("0F0", 0, 1), ("0B0", 1, 3)], [("1F0", 1, 2), ("1B0", 2, 4)]),
        from_text("0F0,0B0\n1F0,1B0"),
    )
    assert found.span_bubble_fraction == 0
    assert found.bubble_fraction == 0.25


def test_a_rank_without_work_is_all_idle(draw):
    schedule = Schedule(
        name="drawn",
        microbatches=1,
        placement=Placement(stage_to_rank=(0, 1)),
        programs=(Program.of([]), Program.of([])),
    )
    found = summarize(draw([("0F0", 0, 4)], []), schedule)
    assert found.idle_s == (0, 4)
    assert found.imbalance_s == (0, 4)
    assert (found.warmup_idle_s[1], found.cooldown_idle_s[1]) == (0, 4)


def test_an_empty_timeline_has_no_bubble(draw):
    found = summarize(draw([], []), SCHEDULE)
    assert (found.makespan_s, found.bubble_fraction, found.bubble_overhead) == (0, 0, 0)
    assert found.peak_activations == (0, 0)


def test_rounding_makes_no_negative_idle_time():
    # Summed in floating point, the steady idle time of rank 1 comes out just below zero.
    schedule = from_text("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")
    costs = Costs.uniform(stages=2, forward_s=0.3, backward_s=0.7)
    found = summarize(simulate(schedule, costs), schedule)
    assert found.idle_s == pytest.approx((1, 1))
    assert all(0 <= steady < 1e-12 for steady in found.steady_idle_s)
