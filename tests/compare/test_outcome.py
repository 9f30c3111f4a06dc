"""A measurement and its prediction: medians, bytes, and a simulator that reproduces itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from comparisons import PACED, REST_S, TRAINED, measurement

from fullbore.compare import assess
from fullbore.errors import CostsError


def test_measured_figures_are_those_of_the_step_with_the_median_makespan():
    found = measurement("1f1b", 2, 4)
    makespans = sorted(timeline.makespan_s for timeline in found.timelines)
    outcome = assess(found, TRAINED)
    assert outcome.measured.timeline is found.timelines[1]
    assert outcome.measured.summary.makespan_s == makespans[1]
    assert outcome.measured.step_s == pytest.approx(makespans[1] + REST_S)


def test_of_two_steps_the_shorter_is_typical():
    found = measurement("1f1b", 2, 4)
    two = replace(found, timelines=found.timelines[:2], step_s=found.step_s[:2])
    assert two.typical is found.timelines[1]
    assert two.median_step_s == pytest.approx(sum(two.step_s) / 2)
    assert two.rest_s == pytest.approx(REST_S)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_a_run_without_disturbance_is_predicted_to_the_last_digit(name):
    found = measurement(name, 2, 4)
    steady = replace(found, timelines=found.timelines[:1], step_s=(99.0,))
    outcome = assess(steady, TRAINED)
    measured, predicted = outcome.measured, outcome.predicted
    assert predicted.summary.makespan_s == pytest.approx(measured.summary.makespan_s)
    assert predicted.summary.bubble_fraction == pytest.approx(measured.summary.bubble_fraction)
    assert predicted.step_s == pytest.approx(measured.step_s) == 99.0
    assert predicted.peak_activation_bytes == measured.peak_activation_bytes


def test_peak_bytes_are_live_microbatches_times_the_bytes_of_their_stage():
    outcome = assess(measurement("1f1b", 2, 4), TRAINED)  # stages hold 1000 and 2000 bytes
    assert outcome.predicted.peak_activation_bytes == (2 * 1000, 1 * 2000)
    assert outcome.measured.peak_activation_bytes == (2 * 1000, 1 * 2000)
    assert [curve.peak for curve in outcome.curves(outcome.predicted)] == [2000, 2000]


def test_mfu_is_flops_by_step_time_of_the_peak():
    measured = assess(measurement("gpipe", 2, 4), TRAINED).measured
    assert measured.mfu == pytest.approx(3e12 / measured.step_s / 2e12)


def test_paced_stages_have_no_mfu_and_no_bytes():
    outcome = assess(measurement("1f1b", 8, 4, paced=True), PACED)
    for figures in (outcome.measured, outcome.predicted):
        assert figures.mfu is None
        assert figures.peak_activation_bytes is None
        assert figures.summary.peak_activations == (4, 4, 4, 4, 4, 3, 2, 1)


def test_change_is_that_of_the_step_time():
    first, second = (assess(measurement(name, 2, 4), TRAINED) for name in ("gpipe", "interleaved"))
    assert first.change(first) == 0
    assert second.change(first) == pytest.approx(second.measured.step_s / first.measured.step_s - 1)


def test_nothing_measured_is_refused():
    with pytest.raises(CostsError, match="no step was measured"):
        assess(replace(measurement("gpipe", 2, 4), timelines=(), step_s=()), TRAINED)


def test_what_cannot_be_predicted_is_still_measured(monkeypatch):
    monkeypatch.delattr("fullbore.compare.outcome.simulate")
    found = measurement("gpipe", 2, 4)
    outcome = assess(found, TRAINED)
    assert outcome.problem is not None and outcome.problem.startswith("NameError: ")
    assert outcome.predicted is None and outcome.costs is None
    assert outcome.measured.timeline is found.timelines[1]
    assert outcome.measured.step_s == found.median_step_s


@pytest.mark.parametrize(
    ("changes", "warns"),
    [({}, False), ({"ranks": 4}, True), ({"ranks": 4, "device": "H100"}, False)],
)
def test_more_ranks_than_cores_are_warned_of(changes, warns):
    assert bool(replace(TRAINED, **changes).warnings) == warns


def test_paced_ranks_may_be_more_than_cores():
    assert PACED.warnings == ()
