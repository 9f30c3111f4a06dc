"""A schedule, its costs and what the simulator says of them: what show and simulate share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullbore.cli.inputs import CostsSource, Shape, read_costs, read_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from fullbore.cost import Costs
    from fullbore.ir import Schedule
    from fullbore.timeline import Curve, Summary, Timeline

    Floats = npt.NDArray[np.float64]

__all__ = ["Prediction", "describe", "memory_curves", "predict", "slips", "spans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One schedule, simulated."""

    schedule: Schedule
    costs: Costs
    overlap: bool
    timeline: Timeline
    summary: Summary


def predict(name: str, shape: Shape, costs_source: CostsSource, *, overlap: bool) -> Prediction:
    """Read or build the schedule, and simulate it; raises FullboreError for bad input."""
    from fullbore.sim import simulate
    from fullbore.timeline import summarize

    schedule = read_schedule(name, shape)
    costs = read_costs(
        costs_source, stages=schedule.stages, splits_backward=schedule.splits_backward
    )
    timeline = simulate(schedule, costs, overlap=overlap)
    return Prediction(
        schedule=schedule,
        costs=costs,
        overlap=overlap,
        timeline=timeline,
        summary=summarize(timeline, schedule),
    )


def memory_curves(prediction: Prediction) -> tuple[Curve, ...] | None:
    """Activation bytes over time, a curve a rank; None where the costs do not say the bytes."""
    from fullbore.sim import memory_curves as curves

    return curves(prediction.timeline, prediction.schedule, prediction.costs)


def describe(prediction: Prediction) -> dict[str, object]:
    """The keys that every JSON document about a simulated schedule has; see docs/json.md."""
    schedule, summary = prediction.schedule, prediction.summary
    curves = memory_curves(prediction)
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "virtual_stages": schedule.virtual_stages,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches // schedule.slices,
        "slices": schedule.slices,
        "stage_to_rank": list(schedule.placement.stage_to_rank),
        "copies": [list(copy) for copy in schedule.placement.copies],
        "overlap": prediction.overlap,
        "makespan_s": summary.makespan_s,
        "bubble_fraction": summary.bubble_fraction,
        "bubble_overhead": summary.bubble_overhead,
        "span_bubble_fraction": summary.span_bubble_fraction,
        "peak_activations": list(summary.peak_activations),
        "peak_activation_bytes": None if curves is None else [curve.peak for curve in curves],
        "busy_s": list(summary.busy_s),
        "idle_s": list(summary.idle_s),
        "warmup_idle_s": list(summary.warmup_idle_s),
        "steady_idle_s": list(summary.steady_idle_s),
        "cooldown_idle_s": list(summary.cooldown_idle_s),
        "imbalance_s": list(summary.imbalance_s),
    }


def slips(prediction: Prediction) -> Floats:
    """By how much each span [n] may end later without moving the end, seconds."""
    from fullbore.timeline import Transit, slack

    costs = prediction.costs
    transit = Transit(
        occupancy_s=costs.occupancy_s,
        hop_s=costs.hop_s,
        overhead_s=costs.overhead_s,
        blocking=not prediction.overlap,
    )
    return slack(prediction.timeline, prediction.schedule, transit)


def spans(timeline: Timeline, chosen: Sequence[int] | None = None) -> list[dict[str, object]]:
    """Spans as JSON: all of them, or those at the chosen indices; from the arrays, for speed."""
    from fullbore.ir import Kind

    at = slice(None) if chosen is None else list(chosen)
    names = [kind.name for kind in Kind]
    columns = (
        timeline.rank,
        timeline.kind,
        timeline.stage,
        timeline.microbatch,
        timeline.start_s,
        timeline.end_s,
    )
    return [
        {
            "rank": rank,
            "action": f"{stage}{names[kind]}{microbatch}",
            "start_s": start_s,
            "end_s": end_s,
        }
        for rank, kind, stage, microbatch, start_s, end_s in zip(
            *(column[at].tolist() for column in columns), strict=True
        )
    ]
