"""A comparison as text in cells: the same rows for the terminal and for the report.

Every measured figure stands beside its prediction, with one unit for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fullbore.compare.measurement import Setting
from fullbore.compare.outcome import Figures, Outcome
from fullbore.cost import Costs
from fullbore.view.units import TimeUnit, byte_unit, plain, time_unit

__all__ = [
    "Pair",
    "Row",
    "columns",
    "duration",
    "headline",
    "peaks_by_rank",
    "percent",
    "rows",
    "stage_costs",
]

NONE = "–"
_DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A measured figure and its prediction in one unit, as text without the unit.

    predicted: `NONE` where there is no prediction.
    """

    measured: str
    predicted: str
    unit: str

    def __str__(self) -> str:
        return f"{self.measured} / {self.predicted} {self.unit}".rstrip()

    @property
    def cells(self) -> tuple[str, str]:
        """Both with the unit."""
        predicted = NONE if self.predicted == NONE else f"{self.predicted} {self.unit}".rstrip()
        return f"{self.measured} {self.unit}".rstrip(), predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule: peak is that of the rank that holds most; change is against the first."""

    schedule: str
    bubble: Pair
    peak: Pair
    step: Pair
    mfu: str
    loss: str
    held_out: str
    change: str


_CELLS = {
    "bubble": "bubble fraction",
    "peak": "peak activations",
    "step": "step time",
    "mfu": "MFU",
    "loss": "loss",
    "held_out": "held-out loss",
    "change": "change",
}
_OF_TRAINING = ("mfu", "loss", "held_out")


def columns(setting: Setting) -> dict[str, str]:
    """The fields of a row that mean something for this job, with their headers."""
    trains = setting.training is not None
    return {name: head for name, head in _CELLS.items() if trains or name not in _OF_TRAINING}


def headline(setting: Setting) -> str:
    """What ran, in one line."""
    what = setting.training.model if setting.training is not None else "paced stages"
    measured = setting.steps - setting.warmup_steps
    return (
        f"{what} on {setting.ranks} ranks, {setting.microbatches} microbatches a step"
        f"{'' if setting.overlap else ', communication not overlapped'}; "
        f"{measured} {'step' if measured == 1 else 'steps'} measured after "
        f"{setting.warmup_steps} of warm-up"
    )


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row a schedule, in the order in which they ran."""
    step_unit = time_unit(max(outcome.measured.step_s for outcome in outcomes))
    peaks = peaks_by_rank(outcomes)
    return [
        _row(outcome, outcomes[0], peak=_worst(outcome, of_ranks), step_unit=step_unit)
        for outcome, of_ranks in zip(outcomes, peaks, strict=True)
    ]


def peaks_by_rank(outcomes: Sequence[Outcome]) -> list[list[Pair]]:
    """Peak activations of each rank of each schedule, all in one unit.

    That is bytes where they were measured, else microbatches × 1/P of the model.
    """
    unit = None
    if outcomes[0].measured.peak_activation_bytes is not None:
        unit = byte_unit(max(max(_peaks(outcome.measured)) for outcome in outcomes))
    size, symbol = (1, "") if unit is None else (unit.size, unit.symbol)
    return [
        [
            Pair(
                measured=plain(m / size, digits=_DIGITS),
                predicted=NONE if p is None else plain(p / size, digits=_DIGITS),
                unit=symbol,
            )
            for m, p in zip(_peaks(outcome.measured), _predicted_peaks(outcome), strict=True)
        ]
        for outcome in outcomes
    ]


def stage_costs(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """What each prediction was made from: forward and backward of each stage, hop, host time."""
    known = [outcome.costs for outcome in outcomes if outcome.costs is not None]
    times_s = [stage.backward_s for costs in known for stage in costs.stages]
    unit = time_unit(max(times_s, default=1.0))

    def listed(values_s: Iterable[float]) -> str:
        return _listed([unit.number(v, digits=_DIGITS) for v in values_s], unit.symbol)

    def cells(costs: Costs | None) -> tuple[str, ...]:
        if costs is None:
            return (NONE,) * 4
        return (
            listed(stage.forward_s for stage in costs.stages),
            listed(stage.backward_s for stage in costs.stages),
            duration(costs.hop_s),
            duration(costs.overhead_s),
        )

    return [cells(outcome.costs) for outcome in outcomes]


def _listed(values: Sequence[str], unit: str) -> str:
    """A value a stage, or one for all where they are the same."""
    if len(values) > 1 and len(set(values)) == 1:
        return f"{values[0]} {unit} each"
    return f"{', '.join(values)} {unit}"


def duration(value_s: float) -> str:
    """A time in the unit that suits, to three digits."""
    unit = time_unit(value_s)
    return f"{unit.number(value_s, digits=_DIGITS)} {unit.symbol}" if value_s > 0 else "0 s"


def percent(share: float) -> str:
    """A share as a number of percent, without the sign."""
    return f"{share * 100:.1f}"


def _row(outcome: Outcome, first: Outcome, *, peak: Pair, step_unit: TimeUnit) -> Row:
    measured, predicted, measurement = outcome.measured, outcome.predicted, outcome.measurement
    losses = measurement.losses
    return Row(
        schedule=measurement.label,
        bubble=Pair(
            measured=percent(measured.summary.bubble_fraction),
            predicted=NONE if predicted is None else percent(predicted.summary.bubble_fraction),
            unit="%",
        ),
        peak=peak,
        step=Pair(
            measured=step_unit.number(measured.step_s, digits=_DIGITS),
            predicted=NONE
            if predicted is None
            else step_unit.number(predicted.step_s, digits=_DIGITS),
            unit=step_unit.symbol,
        ),
        mfu=NONE if measured.mfu is None else f"{percent(measured.mfu)} %",
        loss=f"{losses[-1]:.3f}" if losses else NONE,
        held_out=_held_out(measurement.held_out_before, measurement.held_out_after),
        change=NONE if outcome is first else _signed(outcome.change(first)),
    )


def _signed(share: float) -> str:
    return f"{share * 100:+.1f} %".replace("-", "−")


def _worst(outcome: Outcome, of_ranks: Sequence[Pair]) -> Pair:
    """The pair of the rank that holds most."""
    measured = _peaks(outcome.measured)
    return of_ranks[measured.index(max(measured))]


def _held_out(before: float | None, after: float | None) -> str:
    if before is None:
        return NONE
    return f"{before:.3f} → {NONE if after is None else f'{after:.3f}'}"


def _predicted_peaks(outcome: Outcome) -> Sequence[float | None]:
    if outcome.predicted is None:
        return [None] * len(_peaks(outcome.measured))
    return _peaks(outcome.predicted)


def _peaks(figures: Figures) -> tuple[float, ...]:
    return figures.peak_activation_bytes or figures.summary.peak_activations
