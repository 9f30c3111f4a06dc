"""The exact results that are known for these schedules, over a grid of P, M and v.

All are stated for ranks that are alike. Times are binary fractions, so that sums are exact.
"""

from __future__ import annotations

import pytest

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.ir import Schedule
from fullbore.sim import simulate
from fullbore.timeline import Summary, summarize

FORWARD_S, INPUT_GRAD_S, WEIGHT_GRAD_S = 1.5, 1.25, 0.75
STAGE_S = FORWARD_S + INPUT_GRAD_S + WEIGHT_GRAD_S  # of one rank and microbatch

GRID = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 7, 8) for microbatches in (1, 2, 5, 8, 24)]
LOOPED = [
    (ranks, rounds * ranks, virtual_stages)
    for ranks in (1, 2, 3, 4, 8)
    for rounds in (1, 2, 5)
    for virtual_stages in (2, 3, 4)
]


def figures(schedule: Schedule, *, hop_s: float = 0.0) -> Summary:
    """What a step takes; a virtual stage costs 1/v of a rank's whole work."""
    v = schedule.virtual_stages
    costs = Costs.uniform(
        stages=schedule.stages,
        forward_s=FORWARD_S / v,
        input_grad_s=INPUT_GRAD_S / v,
        weight_grad_s=WEIGHT_GRAD_S / v,
        hop_s=hop_s,
    )
    return summarize(simulate(schedule, costs), schedule)


def assert_idle(figures: Summary, *, ranks: int, microbatches: int, slots: float) -> None:
    """Every rank idles `slots` times T_F+T_I+T_W; the bubbles follow from that."""
    assert figures.idle_s == pytest.approx([slots * STAGE_S] * ranks)
    assert figures.makespan_s == pytest.approx((microbatches + slots) * STAGE_S)
    assert figures.bubble_fraction == pytest.approx(slots / (microbatches + slots))
    assert figures.bubble_overhead == pytest.approx(slots / microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), GRID)
def test_gpipe(ranks, microbatches):
    found = figures(schedules.gpipe(ranks=ranks, microbatches=microbatches))
    assert_idle(found, ranks=ranks, microbatches=microbatches, slots=ranks - 1)
    assert found.peak_activations == (microbatches,) * ranks


@pytest.mark.parametrize(("ranks", "microbatches"), GRID)
def test_one_f_one_b(ranks, microbatches):
    found = figures(schedules.one_f_one_b(ranks=ranks, microbatches=microbatches))
    assert_idle(found, ranks=ranks, microbatches=microbatches, slots=ranks - 1)
    assert found.peak_activations == tuple(min(ranks - r, microbatches) for r in range(ranks))


@pytest.mark.parametrize(("ranks", "microbatches", "v"), LOOPED)
def test_interleaved(ranks, microbatches, v):
    found = figures(schedules.interleaved(ranks=ranks, microbatches=microbatches, virtual_stages=v))
    assert_idle(found, ranks=ranks, microbatches=microbatches, slots=(ranks - 1) / v)
    held = [((v - 1) * ranks + 2 * (ranks - 1 - r) + 1) / v for r in range(ranks)]
    assert found.peak_activations == pytest.approx([min(h, microbatches) for h in held])
    worst = ranks * (1 + (ranks - 1) / (ranks * v))
    assert max(found.peak_activations) == pytest.approx(min(worst, microbatches))


@pytest.mark.parametrize(("ranks", "microbatches", "v"), LOOPED)
def test_looped_bfs(ranks, microbatches, v):
    found = figures(schedules.looped_bfs(ranks=ranks, microbatches=microbatches, virtual_stages=v))
    assert_idle(found, ranks=ranks, microbatches=microbatches, slots=(ranks - 1) / v)
    assert found.peak_activations == pytest.approx((microbatches,) * ranks)


def test_interleaving_holds_more_than_one_f_one_b_not_less():
    plain = figures(schedules.one_f_one_b(ranks=8, microbatches=16))
    interleaved = figures(schedules.interleaved(ranks=8, microbatches=16, virtual_stages=2))
    assert max(interleaved.peak_activations) / max(plain.peak_activations) == 1 + 7 / 16


def test_the_popular_wrong_bubble_of_interleaving_is_wrong():
    # (1/v)(P-1)/(M+P-1) = 15.2 %; the exact figure is 17.9 %.
    found = figures(schedules.interleaved(ranks=8, microbatches=16, virtual_stages=2))
    assert found.bubble_fraction == pytest.approx(7 / 39)
    assert found.bubble_fraction != pytest.approx(7 / 23 / 2, abs=0.02)


@pytest.mark.parametrize(("microbatches", "plain", "interleaved"), [
    (64, 0.099, 0.052), (32, 0.179, 0.099), (16, 0.304, 0.179),
])  # fmt: skip
def test_the_bubbles_of_eight_ranks(microbatches, plain, interleaved):
    for generate in (schedules.gpipe, schedules.one_f_one_b):
        found = figures(generate(ranks=8, microbatches=microbatches))
        assert round(found.bubble_fraction, 3) == plain
    found = figures(schedules.interleaved(ranks=8, microbatches=microbatches, virtual_stages=2))
    assert round(found.bubble_fraction, 3) == interleaved


HOP_S = 2.0**-10


def added_hops(schedule: Schedule) -> float:
    """How many hop latencies a small one adds to the makespan."""
    slower = figures(schedule, hop_s=HOP_S).makespan_s
    return (slower - figures(schedule).makespan_s) / HOP_S


@pytest.mark.parametrize(("ranks", "microbatches"), GRID)
def test_hops_of_gpipe(ranks, microbatches):
    schedule = schedules.gpipe(ranks=ranks, microbatches=microbatches)
    assert added_hops(schedule) == pytest.approx(2 * (ranks - 1))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_hops_of_one_f_one_b_grow_with_m(ranks, rounds):
    schedule = schedules.one_f_one_b(ranks=ranks, microbatches=rounds * ranks)
    assert added_hops(schedule) == pytest.approx(2 * ((ranks - 1) * rounds + ranks - 2))


@pytest.mark.parametrize(("ranks", "microbatches", "v"), [case for case in LOOPED if case[0] > 1])
def test_hops_of_interleaved_do_not(ranks, microbatches, v):
    schedule = schedules.interleaved(ranks=ranks, microbatches=microbatches, virtual_stages=v)
    assert added_hops(schedule) == pytest.approx(2 * v * ranks - 2)
