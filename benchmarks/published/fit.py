"""Fitting the constants of a generation again, from the few rows that they are fitted to.

ampere      times of single stages and layers, never of steps: F, I and W of a rank of both models
            in Table 9 of the zero-bubble paper; forward and backward of one layer in Table 4 of
            Korthikanti 2022 (layers.csv); `message_share` from Table 9's hop within a node.
            `step_share` alone from steps: the 1F1B rows of the zero-bubble paper's Table 4.
hopper      product_share and cast_share: the rows of recent.csv that say `fit`. launch_s: the one
            row of experts.csv that does. What is not named here is as on Ampere.
blackwell   the same.

Every other row is predicted without having been looked at by a fit.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import FP16, Job, jobs
from predict import predict, stages_of
from shapes import GPT

from fullbore.cost.hardware import Cluster, Constants, Layout, Roofline
from fullbore.cost.model import Kernels, Piece, Recompute, Split
from fullbore.cost.model.layer import pieces

__all__ = ["FITTED", "refit"]

HERE = Path(__file__).parent
UNFUSED = Kernels(flash=False)
_MOST = {"cast_share": 0.8, "block_cast_share": 0.8}  # no cast is faster than a copy
_FACTORS = (1.2, 0.83, 1.05, 0.95, 1.01, 0.99)

Errors = Callable[[Constants], Sequence[float]]  # logarithms of predicted over measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Pieces of one rank that were timed together: seconds of forward and of parts of backward."""

    layout: Layout
    kernels: Kernels
    stage: tuple[Piece, ...]
    forward_s: float
    backward_s: tuple[float, ...]  # whole, or I and W

    def errors(self, constants: Constants) -> list[float]:
        """Logarithms of predicted over measured."""
        layout = replace(self.layout, cluster=replace(self.layout.cluster, constants=constants))
        roofline = Roofline(layout=layout, precision=FP16, kernels=self.kernels)
        prices = [roofline.priced(piece) for piece in self.stage]
        halves = [
            sum(price.input_grad_s for price in prices),
            sum(price.weight_grad_s for price in prices),
        ]
        backward = halves if len(self.backward_s) == 2 else [sum(halves)]
        found = [sum(price.forward_s for price in prices), *backward]
        return [
            math.log(made / given)
            for made, given in zip(found, (self.forward_s, *self.backward_s), strict=True)
        ]


def _is_fitted(job: Job) -> bool:
    if job.table.startswith("Zero bubble"):
        return job.printed == "1F1B" and job.measured.profile_s is not None
    return job.fits


FITTED = frozenset((job.table, job.name) for job in jobs() if _is_fitted(job))


def refit() -> None:
    """Print the constants of each generation as its rows would have them."""
    timed = [*_profiles(), *_layers()]

    def of_stages(constants: Constants) -> list[float]:
        return [error for each in timed for error in each.errors(constants)]

    start = Cluster.parse("a100").constants
    names = (
        *("product_share", "inner_lost", "tail_waves"),
        *("traffic_share", "node_share", "hidden_share"),
    )
    ampere = _fitted("ampere, stages", of_stages, start, names, {"node_share": 0.8})
    steps = [job for job in jobs() if job.table.startswith("Zero bubble") and _is_fitted(job)]
    ampere = _fitted("ampere, steps", _of_steps(steps), ampere, ("step_share",))
    for generation, presets in (("hopper", ("h100",)), ("blackwell", ("b200", "gb200"))):
        rows = [job for job in jobs() if job.fits and job.gpu in presets]
        dense = [job for job in rows if not job.mixture]
        start = Cluster.parse(presets[0]).constants
        shares = ("product_share", "cast_share")
        if any(job.precision.in_blocks for job in dense):
            shares = (*shares, "block_cast_share")
        made = _fitted(generation, _of_steps(dense), start, shares, _MOST)
        mixtures = [job for job in rows if job.mixture]
        _fitted(f"{generation}, the host", _of_steps(mixtures), made, ("launch_s",))


def _profiles() -> list[Timed]:
    """The second stage of Table 9's models: no embedding and no head."""
    found = {}
    for job in jobs():
        profile = job.measured.profile_s
        if profile is not None and job.virtual_stages == 1 and job.model not in found:
            found[job.model] = Timed(
                layout=job.layout,
                kernels=job.kernels,
                stage=tuple(stages_of(job)[1]),
                forward_s=profile[0],
                backward_s=profile[1:3],
            )
    return list(found.values())


def _layers() -> list[Timed]:
    with (HERE / "layers.csv").open(newline="", encoding="utf-8") as lines:
        return [_layer(row) for row in csv.DictReader(lines)]


def _layer(row: dict[str, str]) -> Timed:
    tensor = int(row["tensor"])
    made = pieces(
        GPT[row["model"]].shape,
        Split(tensor=tensor, sequence_parallel=row["sequence_parallel"] == "1"),
        sequence=2048,
        microbatch=int(row["microbatch"]),
        recompute=Recompute(granularity=row["recompute"]),  # type: ignore[arg-type]
        precision=FP16,
        causal=False,
        kernels=UNFUSED,
    )
    return Timed(
        layout=Layout(cluster=Cluster.parse("a100:8"), tensor=tensor),
        kernels=UNFUSED,
        stage=(made[1],),
        forward_s=float(row["forward_ms"]) / 1e3,
        backward_s=(float(row["backward_ms"]) / 1e3,),
    )


def _of_steps(rows: Sequence[Job]) -> Errors:
    def errors(constants: Constants) -> list[float]:
        return [math.log(predict(job.under(constants)).step_s / _step_s(job)) for job in rows]

    return errors


def _step_s(job: Job) -> float:
    assert job.measured.step_s is not None
    return job.measured.step_s


def _fitted(
    title: str,
    errors: Errors,
    start: Constants,
    names: Sequence[str],
    most: dict[str, float] | None = None,
) -> Constants:
    """Least squares by trying each constant larger and smaller until nothing is better."""
    limits = {name: 1.0 for name in names if name.endswith("share")} | (most or {})
    best, least = start, _square(errors(start))
    before = math.inf
    while least < before * (1 - 1e-4):
        before = least
        for name in names:
            for factor in _FACTORS:
                value = getattr(best, name) * factor
                if value > limits.get(name, math.inf):
                    continue
                tried = best.model_copy(update={name: value})
                square = _square(errors(tried))
                if square < least:
                    best, least = tried, square
    told = ", ".join(f"{name} {getattr(best, name):.3g}" for name in names)
    count = len(errors(best))
    print(f"{title}: {told}; {count} times, {math.sqrt(least / count):.1%} off (root mean square)")
    return best


def _square(values: Sequence[float]) -> float:
    return sum(value * value for value in values)
