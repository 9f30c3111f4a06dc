"""A measurement beside its prediction: the simulator fed with what the run itself measured."""

from __future__ import annotations

from dataclasses import dataclass

from fullbore.compare.measurement import Measurement, Setting
from fullbore.cost import Costs
from fullbore.cost.measured import costs_of
from fullbore.errors import CostsError
from fullbore.passes import insert_communication
from fullbore.sim import simulate
from fullbore.timeline import Curve, Summary, Timeline, live_curves, summarize

__all__ = ["Figures", "Outcome", "assess"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one side, measured or predicted.

    timeline: what they were taken from, and what is drawn. step_s: of the whole step. mfu: None
    where nothing is computed. peak_activation_bytes: [P], None where no bytes were measured.
    """

    timeline: Timeline
    summary: Summary
    step_s: float
    mfu: float | None
    peak_activation_bytes: tuple[float, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One schedule: how it was measured, what its actions cost, and both sides' figures.

    costs, predicted: None where there is no prediction, for which problem says why.
    """

    measurement: Measurement
    measured: Figures
    costs: Costs | None = None
    predicted: Figures | None = None
    problem: str | None = None

    @property
    def sides(self) -> tuple[tuple[str, Figures], ...]:
        """What there is, by name, the prediction first."""
        predicted = () if self.predicted is None else (("predicted", self.predicted),)
        return *predicted, ("measured", self.measured)

    def curves(self, figures: Figures) -> tuple[Curve, ...]:
        """Live activations of one side over time, in bytes where those are known."""
        return _curves(figures.timeline, self.measurement)

    def change(self, first: Outcome) -> float:
        """How much longer this one's step is than another's, as a share of that."""
        return self.measured.step_s / first.measured.step_s - 1


def assess(measurement: Measurement, setting: Setting) -> Outcome:
    """Predict a measured schedule from its own per-stage times, hop and host overhead.

    Measured figures are those of the step with the median makespan. The predicted step is the
    simulated makespan and the measured rest. What was measured stands whatever becomes of the
    prediction. Raises CostsError where nothing was measured.
    """
    if not measurement.timelines:
        raise CostsError("no step was measured: costs need at least one timeline")
    measured = _figures(
        measurement.typical,
        measurement,
        setting,
        step_s=measurement.median_step_s,
        peaks=_measured_peaks(measurement),
    )
    try:
        costs = _costs(measurement, setting)
        predicted = _predicted(measurement, setting, costs)
    except Exception as error:  # a step that took minutes must not be lost to whatever it is
        problem = f"{type(error).__name__}: {error}"
        return Outcome(measurement=measurement, measured=measured, problem=problem)
    return Outcome(measurement=measurement, measured=measured, costs=costs, predicted=predicted)


def _costs(measurement: Measurement, setting: Setting) -> Costs:
    return costs_of(
        measurement.timelines,
        measurement.schedule,
        activation_bytes=measurement.stage_activation_bytes,
        input_grad_held_bytes=measurement.stage_held_bytes,
        recompute_input_bytes=measurement.stage_input_bytes,
        offload_bytes=measurement.stage_offload_bytes,
        message_bytes=setting.message_bytes,
        overlap=setting.overlap,
    )


def _predicted(measurement: Measurement, setting: Setting, costs: Costs) -> Figures:
    program = insert_communication(measurement.schedule)
    simulated = simulate(program, costs, overlap=setting.overlap)
    peaks = tuple(curve.peak for curve in _curves(simulated, measurement))
    return _figures(
        simulated,
        measurement,
        setting,
        step_s=simulated.makespan_s + measurement.rest_s,
        peaks=None if measurement.peak_activation_bytes is None else peaks,
    )


def _figures(
    timeline: Timeline,
    measurement: Measurement,
    setting: Setting,
    *,
    step_s: float,
    peaks: tuple[float, ...] | None,
) -> Figures:
    training = setting.training
    return Figures(
        timeline=timeline,
        summary=summarize(timeline, measurement.schedule),
        step_s=step_s,
        mfu=training.flops / step_s / training.peak_flops if training is not None else None,
        peak_activation_bytes=peaks,
    )


def _measured_peaks(measurement: Measurement) -> tuple[float, ...] | None:
    """[P]; where activations leave for the host, copies under way included, as in predictions."""
    peaks = measurement.peak_activation_bytes
    if peaks is None or measurement.stage_offload_bytes is None:
        return None if peaks is None else tuple(map(float, peaks))
    return tuple(curve.peak for curve in _curves(measurement.typical, measurement))


def _curves(timeline: Timeline, measurement: Measurement) -> tuple[Curve, ...]:
    return live_curves(
        timeline,
        measurement.schedule,
        held_after_forward=measurement.stage_activation_bytes,
        held_after_input_grad=measurement.stage_held_bytes,
        held_before_recompute=measurement.stage_input_bytes,
        leaves_at_offload=measurement.stage_offload_bytes,
    )
