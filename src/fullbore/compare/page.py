"""A comparison as report.html: tables, how each figure was obtained, and timelines in pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fullbore.compare.measurement import Setting
from fullbore.compare.outcome import Figures, Outcome
from fullbore.compare.tables import (
    Row,
    columns,
    duration,
    headline,
    peaks_by_rank,
    percent,
    rows,
    stage_costs,
)
from fullbore.view import Panel
from fullbore.view.html import Remarks, Table, render
from fullbore.view.panel import BYTES

__all__ = ["page"]

_PAIRS = ("bubble", "peak", "step")


def page(setting: Setting, outcomes: Sequence[Outcome]) -> str:
    """The report as one self-contained page; at least one outcome."""
    names = ", ".join(outcome.measurement.label for outcome in outcomes)
    return render(
        title=f"{names}: measured and predicted",
        panels=[panel for outcome in outcomes for panel in _panels(outcome)],
        tables=[_overview(setting, outcomes), _peaks(setting, outcomes), _costs(outcomes)],
        notes=_notes(setting, outcomes),
        remarks=[
            Remarks(title="How each figure was obtained", entries=tuple(_how(setting, outcomes)))
        ],
    )


def _notes(setting: Setting, outcomes: Sequence[Outcome]) -> list[str]:
    notes = [f"Warning: {warning}." for warning in setting.warnings]
    stopped = [o.measurement.label for o in outcomes if not o.measurement.complete]
    if stopped:
        notes.append(f"Stopped early: {', '.join(stopped)} ran fewer steps than asked.")
    notes += [
        f"Warning: {outcome.measurement.label} could not be predicted: {outcome.problem}."
        for outcome in outcomes
        if outcome.problem is not None
    ]
    notes.append(f"{headline(setting)}.")
    if setting.training is not None:
        notes.append(f"{setting.training.text}.")
    if setting.pace is not None:
        notes.append(f"{setting.pace}.")
    return notes


# -- tables -------------------------------------------------------------------------------------


def _overview(setting: Setting, outcomes: Sequence[Outcome]) -> Table:
    headers, chosen = ["schedule"], columns(setting)
    for name, header in chosen.items():
        headers += [header, "predicted"] if name in _PAIRS else [header]
    return Table(
        caption="Bubble fraction is idle / (ranks × makespan); peak activations are those of the "
        "rank that holds most; change is that of the measured step time against the first row",
        headers=tuple(headers),
        rows=tuple(_cells(row, chosen) for row in rows(outcomes)),
    )


def _cells(row: Row, chosen: Iterable[str]) -> tuple[str, ...]:
    cells = [row.schedule]
    for name in chosen:
        value = getattr(row, name)
        cells += value.cells if name in _PAIRS else [value]
    return tuple(cells)


def _peaks(setting: Setting, outcomes: Sequence[Outcome]) -> Table:
    in_bytes = outcomes[0].measured.peak_activation_bytes is not None
    unit = "" if in_bytes else f" in microbatches × 1/{setting.ranks} of the model"
    return Table(
        caption=f"Peak activations of each rank, measured / predicted{unit}",
        headers=("schedule", *(f"rank {rank}" for rank in range(setting.ranks))),
        rows=tuple(
            (outcome.measurement.label, *map(str, peaks))
            for outcome, peaks in zip(outcomes, peaks_by_rank(outcomes), strict=True)
        ),
    )


def _costs(outcomes: Sequence[Outcome]) -> Table:
    return Table(
        caption="What the predictions were made from, measured in this run; a value a stage",
        headers=("schedule", "forward", "backward", "hop", "host time an action"),
        rows=tuple(
            (outcome.measurement.label, *cells)
            for outcome, cells in zip(outcomes, stage_costs(outcomes), strict=True)
        ),
    )


# -- how ----------------------------------------------------------------------------------------


def _how(setting: Setting, outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    measured = setting.steps - setting.warmup_steps
    alike = " from the same initial weights on the same batches" if setting.training else ""
    entries = [
        (
            "measured",
            f"Each schedule ran {setting.steps} steps{alike}, in the same processes one after the "
            f"other; the last {measured} were measured. Bubble and timeline are those of the step "
            "with the median makespan; step time is the median of whole steps.",
        ),
        (
            "predicted",
            "The simulator ran the same schedule with the costs in the table above, which were "
            "read off this run's own timelines: medians of each stage's forward and backward, of "
            "the hop from a finished computation to a receiver that waits for it, and the mean "
            "host time between the moment when an action could start and when it did.",
        ),
        ("bubble fraction", _how_bubble(setting)),
        ("peak activations", _how_peaks(setting, outcomes)),
        (
            "step time",
            "From the batch to the last rank's optimizer. Predicted: the simulated makespan and "
            "the measured rest of the step outside the pipeline ("
            + ", ".join(duration(o.measurement.rest_s) for o in outcomes)
            + ").",
        ),
        *_how_training(setting, outcomes),
        ("change", _how_change(outcomes)),
    ]
    return entries


def _how_bubble(setting: Setting) -> str:
    text = (
        "idle / (ranks × makespan): idle is whatever a rank does not spend in a forward or "
        "backward: waiting, and host time between actions. The makespan lasts from the step's "
        "first forward to the end of its last backward on any rank."
    )
    if setting.pace is not None:
        text += " A paced action is busy for its nominal time; what it takes longer is host time."
    return text


def _how_peaks(setting: Setting, outcomes: Sequence[Outcome]) -> str:
    if outcomes[0].measured.peak_activation_bytes is None:
        return (
            "The most microbatches that a rank holds between forward and backward, each counted "
            f"as the share of 1/{setting.ranks} of the model that its stage is; paced stages "
            "hold no bytes to measure."
        )
    return (
        "Measured: the most bytes that autograd kept for backward at once on a rank, logits "
        "included, weights not. Predicted: the microbatches alive in the simulated schedule, each "
        "times the bytes that one microbatch of its stage kept when measured."
    )


def _how_training(setting: Setting, outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    training = setting.training
    if training is None:
        return []
    entries = [
        (
            "MFU",
            f"{_flop(training.flops)} of the model a step ({training.flops_count}), by the "
            f"measured step time, of {_flop(training.peak_flops)}/s that all ranks reach together "
            f"({training.peak_source}).",
        ),
        ("loss", f"Of the last step's batch. {_agreement(outcomes)}"),
    ]
    if any(outcome.measurement.held_out_before is not None for outcome in outcomes):
        entries.append(
            ("held-out loss", "Before the first step and after the last, on text not trained on.")
        )
    return entries


def _agreement(outcomes: Sequence[Outcome]) -> str:
    """How far apart the losses of the same step are under different schedules."""
    apart = max(
        (max(step) - min(step)) / abs(min(step))
        for step in zip(*(outcome.measurement.losses for outcome in outcomes), strict=False)
    )
    if apart == 0:
        return "In every step all schedules have the same loss, to the last bit."
    return f"Over all steps the schedules' losses are at most {apart:.1e} (relative) apart."


def _flop(number: float) -> str:
    return f"{number / 1e12:.3g} TFLOP" if number >= 1e12 else f"{number / 1e9:.3g} GFLOP"


def _how_change(outcomes: Sequence[Outcome]) -> str:
    spread = max(
        (max(o.measurement.step_s) - min(o.measurement.step_s)) / o.measurement.median_step_s
        for o in outcomes
    )
    return (
        "Of the measured step time against the first schedule's. Steps of one schedule differed "
        f"by up to {percent(spread)} % among themselves."
    )


# -- charts -------------------------------------------------------------------------------------


def _panels(outcome: Outcome) -> list[Panel]:
    return [_panel(outcome, figures, side) for side, figures in outcome.sides]


def _panel(outcome: Outcome, figures: Figures, side: str) -> Panel:
    summary = figures.summary
    options = {} if figures.peak_activation_bytes is None else {"curve_unit": BYTES}
    return Panel(
        title=f"{outcome.measurement.label}, {side}",
        timeline=figures.timeline,
        curves=outcome.curves(figures),
        facts=(
            f"makespan {duration(summary.makespan_s)}",
            f"bubble fraction {percent(summary.bubble_fraction)} %",
        ),
        **options,
    )
