"""The formulas of the schedules that split the backward, slice sequences or go both ways.

Each holds for the costs that its family's `holds` names, and is tested on those; where a formula
is marked as approximate elsewhere, a test says how far off it is.
"""

from __future__ import annotations

from itertools import product

import pytest

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.ir import Placement, Schedule
from fullbore.sim import simulate
from fullbore.timeline import Summary, summarize

ALIKE = (1.0, 1.0, 1.0)
SHORT_W = [(1.5, 1.25, 0.75), (1.0, 2.0, 1.0), (2.0, 1.0, 0.5)]  # W <= F and W <= I
ANY = [*SHORT_W, ALIKE, (0.5, 1.0, 1.75), (1.0, 0.5, 0.75)]
RANKS = (1, 2, 3, 4, 6, 8)


def figures(schedule: Schedule, costs: tuple[float, ...], *, hop_s: float = 0.0) -> Summary:
    """A step in which each stage takes these seconds for F, I and W."""
    forward_s, input_grad_s, weight_grad_s = costs
    made = Costs.uniform(
        stages=schedule.stages,
        forward_s=forward_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        hop_s=hop_s,
    )
    return summarize(simulate(schedule, made), schedule)


def span_idle(found: Summary) -> float:
    """Idle seconds within the longest span of one rank, where all ranks are equally busy."""
    return found.busy_s[0] / (1 - found.span_bubble_fraction) - found.busy_s[0]


def assert_idle(found: Summary, idle_s: float) -> None:
    assert found.idle_s == pytest.approx([idle_s] * len(found.idle_s))


@pytest.mark.parametrize("ranks", RANKS)
def test_eager_1f1b_idles_as_1f1b_does_and_holds_up_to_twice_as_much(ranks):
    for microbatches, costs in product((1, ranks, 3 * ranks + 1), ANY):
        found = figures(schedules.eager_1f1b(ranks=ranks, microbatches=microbatches), costs)
        assert_idle(found, (ranks - 1) * sum(costs))
        held = [min(2 * (ranks - r) - 1, microbatches) for r in range(ranks)]
        assert found.peak_activations == pytest.approx(held)


@pytest.mark.parametrize("ranks", RANKS)
def test_hops_of_eager_1f1b_do_not_grow_with_m(ranks):
    for microbatches, hop_s in product((1, ranks, 4 * ranks), (0.01, 1.7)):  # 2c <= F + B = 3.5
        eager, costs = schedules.eager_1f1b(ranks=ranks, microbatches=microbatches), SHORT_W[0]
        added_s = figures(eager, costs, hop_s=hop_s).makespan_s - figures(eager, costs).makespan_s
        assert added_s == pytest.approx(2 * (ranks - 1) * hop_s)


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_h1(ranks):
    for factor, costs in product((1, 2, 3), [*SHORT_W, ALIKE]):
        forward, inputs, weights = costs
        schedule = schedules.zb_h1(ranks=ranks, microbatches=factor * ranks)
        found = figures(schedule, costs)
        assert_idle(found, (ranks - 1) * (forward + inputs - weights))
        assert found.peak_activations == (ranks,) * ranks
        if factor > 1:
            added_s = figures(schedule, costs, hop_s=2.0**-10).makespan_s - found.makespan_s
            assert added_s * 2**10 == pytest.approx(4 * (ranks - 1))


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_h2(ranks):
    for microbatches, costs in product((2 * ranks - 1, 4 * ranks), [*SHORT_W, ALIKE]):
        forward, inputs, weights = costs
        schedule = schedules.zb_h2(ranks=ranks, microbatches=microbatches)
        found, delayed = figures(schedule, costs), figures(schedule, costs, hop_s=2.0**-10)
        assert span_idle(found) == pytest.approx((ranks - 1) * (forward + inputs - 2 * weights))
        added_s = span_idle(delayed) - span_idle(found)
        assert added_s * 2**10 == pytest.approx(2 * (ranks - 1), abs=1e-6)
        assert found.peak_activations == (2 * ranks - 1,) * ranks


def test_the_barrier_takes_zb_h2s_gain_back():
    found = figures(schedules.zb_h2(ranks=8, microbatches=32), ALIKE)
    assert found.span_bubble_fraction == pytest.approx(0.0)
    assert round(found.bubble_fraction, 3) == 0.068


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_v(ranks):
    for microbatches in (2 * ranks, 2 * ranks + 1, 5 * ranks):
        found = figures(schedules.zb_v(ranks=ranks, microbatches=microbatches), ALIKE)
        assert span_idle(found) == pytest.approx(0.0)
        assert_idle(found, ranks - 1)
        assert found.peak_activations == (ranks,) * ranks


@pytest.mark.parametrize("ranks", range(1, 17))
def test_v_half_and_v_min(ranks):
    half = (ranks - 1) if ranks < 3 else 3 * ranks - (4 if ranks % 2 else 7)
    least = 0 if ranks == 1 else 4 * ranks - (5 if ranks % 3 else 7)
    for microbatches in (2 * ranks, 5 * ranks + 1):
        found = figures(schedules.v_half(ranks=ranks, microbatches=microbatches), ALIKE)
        assert_idle(found, half)
        assert max(found.peak_activations) == (ranks + 2) // 2
        found = figures(schedules.v_min(ranks=ranks, microbatches=microbatches), ALIKE)
        assert_idle(found, least)
        assert max(found.peak_activations) == (ranks + 4) // 3


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 7])
def test_memory_of_v_half_and_v_min_is_bounded_for_few_microbatches_too(microbatches):
    for ranks in range(1, 13):
        half = figures(schedules.v_half(ranks=ranks, microbatches=microbatches), ALIKE)
        least = figures(schedules.v_min(ranks=ranks, microbatches=microbatches), ALIKE)
        assert max(half.peak_activations) <= min((ranks + 2) // 2, microbatches)
        assert max(least.peak_activations) <= min((ranks + 4) // 3, microbatches)


def test_only_v_mins_bubble_grows_with_m_where_f_i_and_w_differ():
    def idle_s(generate, microbatches: int) -> float:
        schedule = generate(ranks=8, microbatches=microbatches)
        return figures(schedule, (1.0, 1.2, 0.8)).idle_s[0]

    for generate, grows in ((schedules.v_min, True), (schedules.v_half, False)):
        assert (idle_s(generate, 128) > 1.5 * idle_s(generate, 32)) == grows


@pytest.mark.parametrize(("ranks", "v"), product(RANKS, (1, 2, 3, 5)))
def test_gis(ranks, v):
    for factor, costs in product((1, 2, 4), ANY):
        found = figures(
            schedules.gis(ranks=ranks, microbatches=factor * ranks, virtual_stages=v), costs
        )
        assert_idle(found, (ranks - 1) * (costs[0] + costs[1]))
        held = [min(((v - 1) * ranks + ranks - r) / v, factor * ranks) for r in range(ranks)]
        assert found.peak_activations == pytest.approx(held)


@pytest.mark.parametrize(("ranks", "v"), product(RANKS, (1, 2, 3, 5)))
def test_gis_h(ranks, v):
    group = (ranks + 1) // 2
    for factor in (2, 4, 7):
        schedule = schedules.gis_h(ranks=ranks, microbatches=factor * group, virtual_stages=v)
        found = figures(schedule, ALIKE)
        assert_idle(found, 2 * (ranks - 1) + (v - 1) * (ranks // 2))
        held = ((v - 1) * group + ranks) / v
        assert max(found.peak_activations) == pytest.approx(held)


def test_interleaving_costs_memory_that_gis_does_not():
    interleaved = figures(schedules.interleaved(ranks=8, microbatches=32, virtual_stages=4), ALIKE)
    grouped = figures(schedules.gis(ranks=8, microbatches=32, virtual_stages=4), ALIKE)
    half = figures(schedules.gis_h(ranks=8, microbatches=32, virtual_stages=4), ALIKE)
    assert max(interleaved.peak_activations) == 8 * (1 + 7 / (8 * 4))
    assert max(grouped.peak_activations) == 8
    assert max(half.peak_activations) == 5


@pytest.mark.parametrize("ranks", RANKS)
def test_hanayo_with_as_many_microbatches_as_ranks(ranks):
    schedule = schedules.hanayo(ranks=ranks, microbatches=ranks, virtual_stages=2)
    found = figures(schedule, ALIKE)
    assert_idle(found, 4 * (ranks - 1))
    assert max(found.peak_activations) == ranks
    more = figures(schedules.hanayo(ranks=ranks, microbatches=ranks, virtual_stages=4), ALIKE)
    assert more.idle_s[0] == pytest.approx(4 * (ranks - 1), abs=2)
    assert schedule.placement == Placement.wave(ranks=ranks, virtual_stages=2)


@pytest.mark.parametrize("ranks", RANKS)
def test_dualpipe_v(ranks):
    for microbatches in (2 * ranks, 4 * ranks):
        schedule = schedules.dualpipe_v(ranks=ranks, microbatches=microbatches)
        found = figures(schedule, ALIKE)
        assert_idle(found, ranks - 1)
        assert max(found.peak_activations) == (ranks + 0.5 if ranks > 1 else 1.5)
        forward, inputs, weights = costs = SHORT_W[0]
        assert_idle(figures(schedule, costs), (ranks - 1) * (forward + inputs - weights))


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_dualpipe_is_dualpipe_v_of_half_as_many_ranks_with_stages_twice_as_large(ranks):
    for factor in (2, 4):
        schedule = schedules.dualpipe(ranks=ranks, microbatches=factor * ranks)
        found = figures(schedule, SHORT_W[0])
        folded = schedules.dualpipe_v(ranks=ranks // 2, microbatches=factor * ranks // 2)
        assert found.makespan_s == pytest.approx(figures(folded, SHORT_W[0]).makespan_s)
        assert max(found.peak_activations) == ranks + 1
        assert schedule.placement.stages_of(0) == (0, ranks - 1)
        assert schedule.virtual_stages == 2


@pytest.mark.parametrize(("ranks", "slices"), product(RANKS, (1, 2, 4)))
def test_seq1f1b(ranks, slices):
    for microbatches, costs in product((ranks, 3 * ranks), SHORT_W):
        schedule = schedules.seq1f1b(ranks=ranks, microbatches=microbatches, slices=slices)
        found = figures(schedule, costs)
        assert found.busy_s == pytest.approx([microbatches * sum(costs)] * ranks)
        assert_idle(found, (ranks - 1) * sum(costs) / slices)
        held = [min((ranks - r + slices - 1) / slices, microbatches) for r in range(ranks)]
        assert found.peak_activations == pytest.approx(held)


def test_one_slice_is_1f1b():
    assert schedules.seq1f1b(ranks=5, microbatches=7, slices=1) == schedules.one_f_one_b(
        ranks=5, microbatches=7
    )
