"""A comparison as JSON: the document of report.json and `--json`, its keys in docs/compare.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fullbore.compare.measurement import Setting
from fullbore.compare.outcome import Figures, Outcome
from fullbore.timeline import summarize

__all__ = ["BUBBLE", "costs_file", "document"]

BUBBLE = "idle / (ranks * makespan)"


def costs_file(outcome: Outcome) -> str:
    """The name of the costs file that is written beside the document."""
    return f"costs-{outcome.measurement.schedule.name}.json"


def document(setting: Setting, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The whole comparison as plain values."""
    training = setting.training
    return {
        "ranks": setting.ranks,
        "microbatches": setting.microbatches,
        "steps": setting.steps,
        "warmup_steps": setting.warmup_steps,
        "complete": all(outcome.measurement.complete for outcome in outcomes),
        "paced": setting.pace is not None,
        "pace": setting.pace,
        "overlap": setting.overlap,
        "device": setting.device,
        "cores": setting.cores,
        "threads": setting.threads,
        "message_bytes": setting.message_bytes,
        "model": training and training.model,
        "text": training and training.text,
        "tokens_per_step": training and training.tokens,
        "flops_per_step": training and training.flops,
        "flops_count": training and training.flops_count,
        "peak_flops": training and training.peak_flops,
        "peak_source": training and training.peak_source,
        "bubble_definition": BUBBLE,
        "warnings": list(setting.warnings),
        "schedules": [_schedule(outcome, outcomes[0]) for outcome in outcomes],
    }


def _schedule(outcome: Outcome, first: Outcome) -> dict[str, Any]:
    measurement, schedule = outcome.measurement, outcome.measurement.schedule
    return {
        "schedule": schedule.name,
        "virtual_stages": schedule.virtual_stages,
        "slices": schedule.slices,
        "stages": schedule.stages,
        "stage_to_rank": list(schedule.placement.stage_to_rank),
        "complete": measurement.complete,
        "measured": _figures(outcome.measured),
        "predicted": outcome.predicted and _figures(outcome.predicted),
        "problem": outcome.problem,
        "losses": [_number(loss) for loss in measurement.losses],
        "held_out_loss_before": _number(measurement.held_out_before),
        "held_out_loss_after": _number(measurement.held_out_after),
        "change_percent": outcome.change(first) * 100,
        "steps": [
            {
                "makespan_s": timeline.makespan_s,
                "step_s": step_s,
                "bubble_fraction": summarize(timeline, schedule).bubble_fraction,
            }
            for timeline, step_s in zip(measurement.timelines, measurement.step_s, strict=True)
        ],
        "costs": outcome.costs and outcome.costs.model_dump(exclude_none=True, mode="json"),
        "costs_file": outcome.costs and costs_file(outcome),
    }


def _number(value: float | None) -> float | None:
    """JSON has no word for what is not a number."""
    return value if value is not None and math.isfinite(value) else None


def _figures(figures: Figures) -> dict[str, Any]:
    summary, peaks = figures.summary, figures.peak_activation_bytes
    return {
        "bubble_fraction": summary.bubble_fraction,
        "bubble_overhead": summary.bubble_overhead,
        "span_bubble_fraction": summary.span_bubble_fraction,
        "makespan_s": summary.makespan_s,
        "step_s": figures.step_s,
        "mfu": figures.mfu,
        "peak_activations": list(summary.peak_activations),
        "peak_activation_bytes": None if peaks is None else list(peaks),
        "busy_s": list(summary.busy_s),
        "idle_s": list(summary.idle_s),
        "warmup_idle_s": list(summary.warmup_idle_s),
        "steady_idle_s": list(summary.steady_idle_s),
        "cooldown_idle_s": list(summary.cooldown_idle_s),
        "imbalance_s": list(summary.imbalance_s),
    }
