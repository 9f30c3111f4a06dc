"""An R before every backward, in the pipeline's laws, its simulation and its memory."""

import pytest

from fullbore.cost import Costs
from fullbore.errors import NotationError, ScheduleError
from fullbore.ir import Action, Kind, from_text, to_text
from fullbore.passes import insert_communication, recompute_ahead, split_backward
from fullbore.schedules import build, gpipe, one_f_one_b
from fullbore.sim import simulate
from fullbore.timeline import live_curves, summarize
from fullbore.verify import verify


def test_the_drawing_of_the_module() -> None:
    schedule = recompute_ahead(gpipe(ranks=1, microbatches=2))
    assert str(schedule) == "rank 0: 0F0 0F1 0R0 0B0 0R1 0B1"


def test_notation_both_ways() -> None:
    schedule = recompute_ahead(one_f_one_b(ranks=2, microbatches=2))
    assert from_text(to_text(schedule)) == schedule
    assert Action.parse("12R3") == Action(stage=12, kind=Kind.R, microbatch=3)
    with pytest.raises(NotationError, match="RECV_B"):
        Action.parse("1RECV3")


@pytest.mark.parametrize("ahead", [0, 1, 3, 1000])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_result_is_lawful_and_without_its_recomputations_the_same(name, ahead) -> None:
    for schedule in (split_backward(build(name, ranks=4, microbatches=8), delay=2),):
        with_r = recompute_ahead(schedule, ahead=ahead)
        assert verify(with_r) == [] and verify(insert_communication(with_r)) == []
        for before, after in zip(schedule.programs, with_r.programs, strict=True):
            assert after.select(after.kind != Kind.R) == before
            assert (after.kind == Kind.R).sum() == (before.kind == Kind.I).sum()
        assert recompute_ahead(with_r, ahead=2) == with_r


def test_a_recomputation_in_the_wrong_place_is_a_violation() -> None:
    wrong = {
        "0R0,0F0,0B0": ("ordered", "needs 0F0"),
        "0F0,0B0,0R0": ("ordered", "needs 0R0"),
        "0F0,0R0,0R0,0B0": ("complete", "second time"),
    }
    for text, (rule, detail) in wrong.items():
        found = verify(from_text(text))
        assert [v.rule for v in found] == [rule] and detail in found[0].detail


def test_it_fills_the_bubble_in_front_of_the_gradient() -> None:
    """One microbatch: rank 0 makes its forward again while rank 1 computes."""
    schedule = recompute_ahead(gpipe(ranks=2, microbatches=1))
    costs = Costs.uniform(stages=2, forward_s=1, backward_s=2)
    timeline = simulate(schedule, costs)
    # 0F0 1F0 1R0 1B0 0B0, while 0R0 runs beside 1F0
    assert timeline.makespan_s == 1 + 1 + 1 + 2 + 2
    at = {str(span.action): (span.start_s, span.end_s) for span in timeline}
    assert at["0R0"] == (1, 2) and at["1R0"] == (2, 3)
    assert simulate(insert_communication(schedule), costs).makespan_s == timeline.makespan_s
    half = costs.model_copy(
        update={"stages": tuple(s.model_copy(update={"recompute_s": 0.5}) for s in costs.stages)}
    )
    assert simulate(schedule, half).makespan_s == 6.5


def test_activations_are_alive_from_the_recomputation_on() -> None:
    schedule = recompute_ahead(gpipe(ranks=2, microbatches=8))
    timeline = simulate(schedule, Costs.uniform(stages=2))
    assert summarize(timeline, schedule).peak_activations == (1, 1)
    assert verify(schedule, peak_limit=1) == []
    early = recompute_ahead(gpipe(ranks=2, microbatches=8), ahead=2)
    assert summarize(simulate(early, Costs.uniform(stages=2)), early).peak_activations == (3, 3)
    assert [v.rule for v in verify(early, peak_limit=1)] == ["live-activations"] * 2


def test_bytes_with_and_without_an_r() -> None:
    """100 B of activations, of which 10 are what a recomputation needs."""
    plain = gpipe(ranks=1, microbatches=3)
    timeline = simulate(plain, Costs.uniform(stages=1))
    (curve,) = live_curves(timeline, plain, held_after_forward=[100], held_before_recompute=[10])
    assert list(curve.values) == [0, 10, 20, 30, 120, 20, 110, 10, 100, 0]
    ahead = recompute_ahead(plain)
    (curve,) = live_curves(
        simulate(ahead, Costs.uniform(stages=1)),
        ahead,
        held_after_forward=[100],
        held_before_recompute=[10],
    )
    assert list(curve.values) == [0, 10, 20, 30, 120, 20, 110, 10, 100, 0]


def test_a_negative_lead_is_refused() -> None:
    with pytest.raises(ScheduleError, match="nearest legal value is 0"):
        recompute_ahead(one_f_one_b(ranks=2, microbatches=2), ahead=-1)
