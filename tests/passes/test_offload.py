"""Activations that leave for the host and come back: laws, simulation and memory."""

import pytest
from making import schedule_of

from fullbore.cost import Costs
from fullbore.errors import CostsError, NotationError, ScheduleError
from fullbore.ir import Action, Kind, from_text, to_text
from fullbore.passes import insert_communication, offload, recompute_ahead, split_backward
from fullbore.schedules import build, gpipe, one_f_one_b
from fullbore.sim import simulate
from fullbore.timeline import critical_path, live_curves, summarize
from fullbore.verify import verify

COPIES = (Kind.OFFLOAD, Kind.RELOAD)


def peak(schedule) -> float:
    """The least limit that the schedule keeps, to a microbatch x 1/P of the model."""
    return next(limit for limit in range(1, 99) if not verify(schedule, peak_limit=limit))


def test_the_drawing_of_the_module() -> None:
    drawn = offload(gpipe(ranks=1, microbatches=3), ahead=0)
    assert str(drawn) == (
        "rank 0: 0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0RELOAD0 0B0 0RELOAD1 0B1 0RELOAD2 0B2"
    )


def test_the_first_rank_of_1f1b() -> None:
    program = offload(one_f_one_b(ranks=3, microbatches=4)).programs[0]
    assert str(program) == (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0F2 0OFFLOAD2 0B0 0RELOAD1 0F3 0OFFLOAD3 "
        "0RELOAD2 0B1 0RELOAD3 0B2 0B3"
    )


def test_notation_both_ways() -> None:
    schedule = offload(one_f_one_b(ranks=3, microbatches=4))
    assert from_text(to_text(schedule)) == schedule
    assert Action.parse("12RELOAD3") == Action(stage=12, kind=Kind.RELOAD, microbatch=3)
    with pytest.raises(NotationError, match="OFFLOAD"):
        Action.parse("1LOAD3")


@pytest.mark.parametrize(("away", "ahead"), [(1, 0), (1, 1), (2, 3), (1000, 1)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_result_is_lawful_and_without_its_copies_the_same(name, away, ahead) -> None:
    whole = build(name, ranks=4, microbatches=8)
    for schedule in (whole, split_backward(whole, delay=2), insert_communication(whole)):
        away_and_back = offload(schedule, away=away, ahead=ahead)
        assert verify(away_and_back) == [] and verify(insert_communication(away_and_back)) == []
        bare = schedule if schedule.has_communication is False else whole
        for before, after in zip(bare.programs, away_and_back.programs, strict=True):
            assert after.select(~_copies(after)) == before
            where = {str(action): i for i, action in enumerate(after)}
            for i, action in enumerate(before):
                if action.kind in (Kind.B, Kind.I):
                    lived = i - list(before).index(_with(action, Kind.F)) - 1
                    left = str(_with(action, Kind.OFFLOAD)) in where
                    assert left == (lived >= away + ahead)
        assert offload(away_and_back, away=away, ahead=ahead) == away_and_back


def _with(action: Action, kind: Kind) -> Action:
    return Action(stage=action.stage, kind=kind, microbatch=action.microbatch)


def _copies(program):
    return (program.kind == Kind.OFFLOAD) | (program.kind == Kind.RELOAD)


def test_only_the_stages_that_are_named_and_nothing_that_is_made_again() -> None:
    schedule = build("interleaved", ranks=2, microbatches=4, virtual_stages=2)
    some = offload(schedule, stages=[0])
    assert {int(s) for p in some.programs for s in p.stage[_copies(p)]} == {0}
    again = recompute_ahead(schedule)
    assert offload(again) == again
    assert verify(recompute_ahead(some)) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"ahead": -1}, "ahead is -1: the nearest legal value is 0"),
        ({"away": 0}, "away is 0: the nearest legal value is 1"),
        ({"stages": [4]}, "there is no stage 4: stages are 0..1"),
    ],
)
def test_wrong_numbers_are_refused(wrong, told) -> None:
    with pytest.raises(ScheduleError, match=told):
        offload(one_f_one_b(ranks=2, microbatches=2), **wrong)


@pytest.mark.parametrize(
    ("text", "rule", "detail"),
    [
        ("0OFFLOAD0,0F0,0RELOAD0,0B0", "ordered", "needs 0F0"),
        ("0F0,0RELOAD0,0OFFLOAD0,0B0", "ordered", "needs 0OFFLOAD0"),
        ("0F0,0OFFLOAD0,0B0,0RELOAD0", "ordered", "needs 0RELOAD0"),
        ("0F0,0B0,0OFFLOAD0,0RELOAD0", "ordered", "needs 0RELOAD0"),
        ("0F0,0OFFLOAD0,0B0", "complete", "OFFLOAD is there without it"),
        ("0F0,0RELOAD0,0B0", "complete", "RELOAD is there without it"),
        ("0F0,0OFFLOAD0,0OFFLOAD0,0RELOAD0,0B0", "complete", "second time"),
        ("0F0,0OFFLOAD0,0RELOAD0,0RELOAD0,0I0,0W0", "complete", "second time"),
        ("0F0,0OFFLOAD0,0RELOAD0,0R0,0B0", "complete", "come back from it, too"),
    ],
)
def test_copies_in_the_wrong_place_are_violations(text, rule, detail) -> None:
    (found,) = verify(from_text(text))
    assert found.rule == rule and detail in found.detail


def test_a_copy_on_another_rank_is_a_violation() -> None:
    rows = ("0F0 0OFFLOAD0 0B0", "1F0 0RELOAD0 1B0")
    found = verify(schedule_of(*rows, placement=(0, 1), microbatches=1))
    assert {v.rule for v in found} == {"placed"}


def test_live_activations_fall_and_rise_again() -> None:
    """By program order a rank holds what it works on, and what it has called back ahead."""
    for name, without, ahead_0, ahead_1 in (("gpipe", 8, 1, 2), ("1f1b", 4, 1, 2)):
        schedule = build(name, ranks=4, microbatches=8)
        assert peak(schedule) == without
        assert peak(offload(schedule, ahead=0)) == ahead_0
        assert peak(offload(schedule, ahead=1)) == ahead_1
        for ahead in (0, 1):
            made = offload(schedule, ahead=ahead)
            at_once = summarize(simulate(made, Costs.uniform(stages=4, offload_s=0)), made)
            assert max(at_once.peak_activations) == peak(made)


def test_copies_run_beside_computation_one_after_the_other() -> None:
    schedule = offload(gpipe(ranks=1, microbatches=3), ahead=0)
    timeline = simulate(schedule, Costs.uniform(stages=1, offload_s=1.5))
    at = {str(span.action): (span.start_s, span.end_s) for span in timeline}
    assert [at[f"0F{m}"] for m in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert [at[f"0OFFLOAD{m}"] for m in range(3)] == [(1, 2.5), (2.5, 4), (4, 5.5)]
    assert at["0RELOAD0"] == (5.5, 7) and at["0B0"] == (7, 9)
    assert at["0RELOAD1"] == (9, 10.5) and at["0B1"] == (10.5, 12.5)
    assert timeline.makespan_s == 16
    (busy,) = summarize(timeline, schedule).busy_s
    assert busy == 9  # copies are no work of the rank


def test_a_reload_ahead_of_time_costs_nothing() -> None:
    schedule = offload(gpipe(ranks=1, microbatches=4), ahead=1)

    def makespan_s(copy_s: float) -> float:
        return simulate(schedule, Costs.uniform(stages=1, offload_s=copy_s)).makespan_s

    # 0F0 leaves beside 0F1 and so on; all but the first come back beside a backward
    assert makespan_s(0.5) == 4 + 8
    assert makespan_s(1) == 4 + 8 + 1  # 0RELOAD0 begins behind 0OFFLOAD2, with 0F3, and ends late
    assert makespan_s(2) > 4 + 8 + 1


def test_what_is_under_way_is_in_memory() -> None:
    """100 B, of which 90 leave: until the copy's end they are here, and again from its start."""
    schedule = from_text("0F0,0OFFLOAD0,0F1,0RELOAD0,0B0,0B1")
    costs = Costs.uniform(stages=1, offload_s=0.5)
    (curve,) = live_curves(
        simulate(schedule, costs),
        schedule,
        held_after_forward=[100],
        leaves_at_offload=[90],
    )
    points = list(zip(curve.times_s.tolist(), curve.values.tolist(), strict=True))
    assert points == [(0, 0), (0, 100), (1, 200), (1.5, 110), (2, 200), (4.5, 100), (6.5, 0)]
    (counted,) = live_curves(simulate(schedule, costs), schedule)
    assert counted.values.tolist() == [0, 1, 2, 1, 2, 1, 0]


def test_the_critical_path_goes_through_copies() -> None:
    schedule = offload(gpipe(ranks=1, microbatches=2), ahead=0)
    timeline = simulate(schedule, Costs.uniform(stages=1, offload_s=5))
    path = [str(list(timeline)[i].action) for i in critical_path(timeline, schedule)]
    assert path == ["0F0", "0OFFLOAD0", "0OFFLOAD1", "0RELOAD0", "0B0", "0RELOAD1", "0B1"]
    beside = simulate(schedule, Costs.uniform(stages=1, offload_s=0.25))
    path = [str(list(beside)[i].action) for i in critical_path(beside, schedule)]
    assert path == ["0F0", "0F1", "0OFFLOAD1", "0RELOAD0", "0B0", "0RELOAD1", "0B1"]


def test_seconds_come_from_bytes_where_nothing_else_says_them() -> None:
    schedule = from_text("0F0,0OFFLOAD0,0F1,0RELOAD0,0B0,0B1")
    stage = {"forward_s": 1, "backward_s": 2, "activation_bytes": 100, "offload_bytes": 80}

    def copies(**more):
        costs = Costs.parse({"stages": [stage | more], "offload_bytes_per_s": 40})
        spans = simulate(schedule, costs)
        return [s.end_s - s.start_s for s in spans if s.action.kind in COPIES]

    assert copies() == [2, 2]
    assert copies(offload_s=0.5) == [0.5, 0.5]
    assert copies(offload_s=0.5, reload_s=0.25) == [0.5, 0.25]


def test_a_schedule_that_offloads_needs_to_know_what_that_takes() -> None:
    schedule = offload(gpipe(ranks=1, microbatches=2), ahead=0)
    for costs in (
        Costs.uniform(stages=1),
        Costs.uniform(stages=1, activation_bytes=10),
        Costs.uniform(stages=1, offload_bytes_per_s=10),
    ):
        with pytest.raises(CostsError, match=r"0OFFLOAD0.*give offload_s a stage, or activation_b"):
            simulate(schedule, costs)
    for wrong in ({"offload_bytes": 1}, {"reload_s": 1}):
        with pytest.raises(CostsError, match="give"):
            Costs.parse({"stages": [{"forward_s": 1, "backward_s": 2} | wrong]})
    with pytest.raises(CostsError, match="more offload_bytes than activation_bytes"):
        Costs.uniform(stages=1, activation_bytes=1).parse(
            {
                "stages": [
                    {"forward_s": 1, "backward_s": 2, "activation_bytes": 1, "offload_bytes": 2}
                ]
            }
        )
