"""Live activations of small schedules, counted by hand."""

from __future__ import annotations

import pytest
from making import schedule_of

from fullbore.cost import Costs
from fullbore.ir import from_text
from fullbore.schedules import one_f_one_b
from fullbore.sim import simulate
from fullbore.timeline import Curve, live_curves, summarize


def curves(text: str, costs: Costs, **held: list[float]) -> tuple[Curve, ...]:
    schedule = from_text(text)
    return live_curves(simulate(schedule, costs), schedule, **held)


def points(curve: Curve) -> list[tuple[float, float]]:
    return list(zip(curve.times_s.tolist(), curve.values.tolist(), strict=True))


def test_an_activation_lives_from_the_start_of_f_to_the_end_of_b():
    first, last = curves("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", Costs.uniform(stages=2))
    assert points(first) == [(0, 0), (0, 1), (1, 2), (6, 1), (9, 0)]
    # At 4 the first is let go before the second begins: never two.
    assert points(last) == [(0, 0), (1, 1), (4, 0), (4, 1), (7, 0)]
    assert (first.peak, last.peak) == (2, 1)


def test_a_virtual_stage_counts_its_share():
    # Two stages on each of two ranks: each is half of a rank's part of the model.
    text = "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0"
    first, _ = curves(text, Costs.uniform(stages=4))
    assert points(first) == [(0, 0), (0, 0.5), (2, 1), (8, 0.5), (12, 0)]


def test_a_split_backward_is_live_until_w_has_ended():
    costs = Costs.uniform(stages=1, input_grad_s=1, weight_grad_s=1)
    (curve,) = curves("0F0,0I0,0F1,0W0,0I1,0W1", costs)
    assert points(curve) == [(0, 0), (0, 1), (2, 1), (2, 2), (4, 1), (5, 1), (6, 0)]


def test_what_i_lets_go_and_what_w_keeps_in_bytes():
    costs = Costs.uniform(stages=1, input_grad_s=1, weight_grad_s=1)
    (curve,) = curves(
        "0F0,0I0,0F1,0W0,0I1,0W1",
        costs,
        held_after_forward=[100.0],
        held_after_input_grad=[30.0],
    )
    assert points(curve) == [(0, 0), (0, 100), (2, 30), (2, 130), (4, 100), (5, 30), (6, 0)]
    assert curve.peak == 130


def test_unlike_stages_hold_unlike_amounts():
    first, last = curves(
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
        Costs.uniform(stages=2),
        held_after_forward=[10.0, 400.0],
    )
    assert (first.peak, last.peak) == (20, 400)


def test_without_input_gradients_held_all_stays_until_w():
    costs = Costs.uniform(stages=1, input_grad_s=1, weight_grad_s=1)
    (curve,) = curves("0F0,0I0,0W0", costs, held_after_forward=[100.0])
    assert points(curve) == [(0, 0), (0, 100), (2, 100), (3, 0)]


def test_actions_that_take_no_time_still_count_in_order():
    # All forwards at time 0; the peak is that of the order, not of whatever the sort makes of it.
    costs = Costs.uniform(stages=1, forward_s=0, backward_s=0)
    (curve,) = curves("0F0,0F1,0B0,0B1", costs)
    assert curve.values.tolist() == [0, 1, 2, 1, 0]


def test_the_peak_of_the_summary_is_the_peak_of_the_curve():
    schedule = from_text("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0")
    timeline = simulate(schedule, Costs.uniform(stages=4))
    peaks = [curve.peak for curve in live_curves(timeline, schedule)]
    assert summarize(timeline, schedule).peak_activations == pytest.approx(peaks)


def test_peer_29_every_rank_is_priced_by_its_own_stages():
    """Layers [1, 2, 2, 3] under 1F1B: no rank at the average of 2."""
    layers = [1.0, 2.0, 2.0, 3.0]
    schedule = one_f_one_b(ranks=4, microbatches=8)
    timeline = simulate(schedule, Costs.uniform(stages=4))
    found = live_curves(timeline, schedule, held_after_forward=layers)
    assert [curve.peak for curve in found] == [4 * 1, 3 * 2, 2 * 2, 1 * 3]


def test_peer_29_a_v_has_embedding_and_head_on_rank_0():
    embedding, block, head = 1.0, 2.0, 5.0
    programs = ("0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")
    schedule = schedule_of(*programs, placement=(0, 1, 1, 0), microbatches=2)
    timeline = simulate(schedule, Costs.uniform(stages=4))
    held = [embedding + block, block, block, block + head]
    both_ends, middle = live_curves(timeline, schedule, held_after_forward=held)
    assert (both_ends.peak, middle.peak) == (embedding + 2 * block + head, 2 * block)
