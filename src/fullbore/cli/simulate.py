"""`fullbore simulate`: what a schedule would cost, in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

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
    Slices,
    VirtualStages,
    WeightGradSeconds,
)
from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.cli.prediction import Prediction
    from fullbore.sim import Spread

__all__ = ["simulate"]

_JITTER = "Times that vary"


def simulate(
    schedule: ScheduleName,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    virtual_stages: VirtualStages = None,
    group_size: GroupSize = None,
    slices: Slices = None,
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
    jitter: Annotated[
        float | None,
        typer.Option(
            "--jitter",
            metavar="X",
            help="Simulate many steps in which every action's time varies by this share, such as "
            "0.1 (standard deviation; log-normal, mean 1).",
            rich_help_panel=_JITTER,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            metavar="N",
            help="How many steps, 200 if not given.",
            rich_help_panel=_JITTER,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Of the random numbers, 0 if not given.",
            rich_help_panel=_JITTER,
        ),
    ] = None,
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

    if jitter is None and (samples is not None or seed is not None):
        raise ConfigError("--samples and --seed are for times that vary: add --jitter, such as 0.1")
    prediction = predict(
        schedule,
        Shape(
            ranks=ranks,
            microbatches=microbatches,
            virtual_stages=virtual_stages,
            group_size=group_size,
            slices=slices,
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
    varied = None
    if jitter is not None:
        varied = _vary(prediction, jitter, 200 if samples is None else samples, seed or 0)
    if as_json:
        document = {**describe(prediction), "critical_path": spans(prediction.timeline, path)}
        print_json(document if varied is None else {**document, "jitter": _spread(varied)})
    else:
        _print(prediction, path)
        if varied is not None:
            print(_jitter_line(varied))


def _vary(prediction: Prediction, jitter: float, samples: int, seed: int) -> Spread:
    from fullbore.sim import spread

    return spread(
        prediction.schedule,
        prediction.costs,
        jitter=jitter,
        samples=samples,
        seed=seed,
        overlap=prediction.overlap,
    )


def _spread(varied: Spread) -> dict[str, object]:
    """The distribution of the makespan as JSON."""
    quantiles = {f"p{percent}_s": varied.quantile_s(percent / 100) for percent in (50, 90, 99)}
    return {
        "jitter": varied.jitter,
        "samples": len(varied.makespans_s),
        "seed": varied.seed,
        "mean_s": varied.mean_s,
        **quantiles,
        "makespans_s": varied.makespans_s.tolist(),
    }


def _jitter_line(varied: Spread) -> str:
    from fullbore.cli.figures import counted, percent, seconds

    told = ", ".join(
        f"{name} {seconds(value_s)}"
        for name, value_s in (
            ("mean", varied.mean_s),
            ("p50", varied.quantile_s(0.5)),
            ("p90", varied.quantile_s(0.9)),
            ("p99", varied.quantile_s(0.99)),
        )
    )
    steps = counted(len(varied.makespans_s), "step")
    return f"with jitter       {told}: the makespan of {steps} at {percent(varied.jitter)} jitter"


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
