"""How figures read on the terminal; each bubble is printed with its definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fullbore.cli.prediction import Prediction

__all__ = ["counted", "facts", "headline", "percent", "seconds", "totals"]

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def seconds(value_s: float) -> str:
    """A time to four digits, in the unit that suits: `1.5 ms`; what rounding left over is 0."""
    if abs(value_s) < 1e-12:
        return "0 s"
    symbol, size = next((unit for unit in _UNITS if abs(value_s) >= unit[1]), _UNITS[-1])
    digits = value_s / size
    return f"{digits:.4g} {symbol}" if abs(digits) < 10_000 else f"{digits:.0f} {symbol}"


def percent(share: float) -> str:
    """A share as `27.3 %`."""
    return f"{share * 100:.1f} %"


def counted(number: int, noun: str) -> str:
    """A number of things, in words that agree: `1 rank`, `4 microbatches`."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def headline(prediction: Prediction) -> str:
    """Which schedule, at which size."""
    schedule = prediction.schedule
    stages = f" × {schedule.virtual_stages} stages" if schedule.virtual_stages > 1 else ""
    slices = f" × {schedule.slices} slices" if schedule.slices > 1 else ""
    overlap = "" if prediction.overlap else ", communication not overlapped"
    return (
        f"{schedule.name}: {counted(schedule.ranks, 'rank')}{stages}, "
        f"{counted(schedule.microbatches // schedule.slices, 'microbatch')}{slices}{overlap}"
    )


def totals(prediction: Prediction) -> list[str]:
    """Makespan, the three bubbles with their definitions, and the worst peak."""
    summary, schedule = prediction.summary, prediction.schedule
    peak = max(summary.peak_activations)
    worst = summary.peak_activations.index(peak)
    lines = [
        f"makespan          {seconds(summary.makespan_s)}",
        f"bubble fraction   {percent(summary.bubble_fraction)}   idle / (ranks × makespan)",
        f"span fraction     {percent(summary.span_bubble_fraction)}   "
        "the same with the longest span of one rank as makespan",
        f"bubble overhead   {percent(summary.bubble_overhead)}   idle / busy",
        f"peak activations  {peak:.4g} microbatches × 1/{schedule.ranks} of the model, "
        f"on rank {worst}",
    ]
    return lines + _bytes(prediction)


def _bytes(prediction: Prediction) -> list[str]:
    """The worst peak in bytes, where the costs say how many bytes a stage holds."""
    from fullbore.cli.prediction import memory_curves
    from fullbore.view.units import amount

    curves = memory_curves(prediction)
    if curves is None:
        return []
    peaks = [curve.peak for curve in curves]
    worst = peaks.index(max(peaks))
    return [f"peak memory       {amount(peaks[worst], 'bytes')} of activations, on rank {worst}"]


def facts(prediction: Prediction) -> tuple[str, ...]:
    """The same in short, to stand beneath a picture's title."""
    summary = prediction.summary
    return (
        f"makespan {seconds(summary.makespan_s)}",
        f"bubble fraction (idle / total) {percent(summary.bubble_fraction)}",
        f"peak activations {max(summary.peak_activations):.4g} microbatches "
        f"× 1/{prediction.schedule.ranks} of the model",
    )
