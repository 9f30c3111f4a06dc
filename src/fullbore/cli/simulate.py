"""`fullbore simulate`: what a schedule would cost, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullbore.cli.inputs import CostsSource, Shape
from fullbore.cli.options import (
    BackwardSeconds,
    CostsFile,
    ForwardSeconds,
    GroupSize,
    HopSeconds,
    InputGradSeconds,
    JsonFlag,
    Microbatches,
    Offload,
    OffloadAhead,
    OffloadSeconds,
    OverlapFlag,
    Ranks,
    ScheduleName,
    VirtualStages,
    WeightGradSeconds,
)

if TYPE_CHECKING:
    from fullbore.cli.prediction import Prediction

__all__ = ["simulate"]


def simulate(
    schedule: ScheduleName,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    virtual_stages: VirtualStages = None,
    group_size: GroupSize = None,
    offload: Offload = None,
    offload_ahead: OffloadAhead = None,
    forward_s: ForwardSeconds = None,
    backward_s: BackwardSeconds = None,
    input_grad_s: InputGradSeconds = None,
    weight_grad_s: WeightGradSeconds = None,
    hop_s: HopSeconds = None,
    offload_s: OffloadSeconds = None,
    costs: CostsFile = None,
    overlap: OverlapFlag = True,
    as_json: JsonFlag = False,
) -> None:
    """Predict makespan, bubble, idle time and memory.

    All seconds are those of one stage and one microbatch. To compare one model under different v,
    divide the seconds of a whole rank by v: 1F1B with --forward-s 1 --backward-s 2 does the work
    of interleaved -v 2 with --forward-s 0.5 --backward-s 1.
    """
    from fullbore.cli.output import print_json
    from fullbore.cli.prediction import describe, predict, spans
    from fullbore.timeline import critical_path

    prediction = predict(
        schedule,
        Shape(
            ranks=ranks,
            microbatches=microbatches,
            virtual_stages=virtual_stages,
            group_size=group_size,
            offload=offload,
            offload_ahead=offload_ahead,
        ),
        CostsSource(
            file=costs,
            forward_s=forward_s,
            backward_s=backward_s,
            input_grad_s=input_grad_s,
            weight_grad_s=weight_grad_s,
            hop_s=hop_s,
            offload_s=offload_s,
        ),
        overlap=overlap,
    )
    path = critical_path(prediction.timeline, prediction.schedule)
    if as_json:
        print_json({**describe(prediction), "critical_path": spans(prediction.timeline, path)})
    else:
        _print(prediction, path)


def _print(prediction: Prediction, path: list[int]) -> None:
    from fullbore.cli.figures import headline, totals

    print(headline(prediction), _rank_table(prediction), sep="\n\n")
    print("", *totals(prediction), _critical(prediction, path), sep="\n")


def _rank_table(prediction: Prediction) -> str:
    """Idle time by phase and peak activations, a row a rank, all times in one unit."""
    from fullbore.cli.output import table
    from fullbore.view.units import time_unit

    summary = prediction.summary
    unit = time_unit(summary.makespan_s)
    columns = {
        "busy": summary.busy_s,
        "idle": summary.idle_s,
        "warm-up": summary.warmup_idle_s,
        "steady": summary.steady_idle_s,
        "cool-down": summary.cooldown_idle_s,
        "imbalance": summary.imbalance_s,
    }
    header = ["rank", *(f"{name}, {unit.symbol}" for name in columns), "peak activations"]
    rows = [
        [
            str(rank),
            *(unit.number(round(value, 12), digits=4) for value in times),
            f"{summary.peak_activations[rank]:.4g}",
        ]
        for rank, times in enumerate(zip(*columns.values(), strict=True))
    ]
    return table(header, rows)


def _critical(prediction: Prediction, path: list[int]) -> str:
    import numpy as np

    from fullbore.cli.figures import seconds

    timeline = prediction.timeline
    chain = np.array(path, dtype=np.int64)
    computes = chain[timeline.is_compute[chain]]
    busy_s = float((timeline.end_s[computes] - timeline.start_s[computes]).sum())
    rest_s = prediction.summary.makespan_s - busy_s
    rest = "communication, copies" if timeline.is_copy.any() else "communication"
    return (
        f"critical path     {seconds(busy_s)} of compute in {len(computes)} actions, "
        f"{seconds(rest_s)} of {rest} and host time between them"
    )
