"""Costs that the search is measured on: published profiles, and uneven ones as they occur.

All times in milliseconds of one stage and one microbatch; a rank holds two stages unless it says
otherwise.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fullbore.cost import Costs

PUBLISHED = Path(__file__).parents[1] / "published" / "published.csv"

# What a W holds of what its F held, by Table 1 of the zero-bubble paper: 32 / (34 + 5 a s / h).
HELD_BY_W = {"1.5B": 32 / (34 + 5 * 24 * 1024 / 2304), "14.6B": 32 / (34 + 5 * 40 * 1024 / 5120)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A name, P and M, and costs of P or 2 P stages."""

    name: str
    ranks: int
    microbatches: int
    costs: Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One row of the paper's profiles, with its printed span bubbles by schedule."""

    model: str
    profile: Profile
    printed: dict[str, float]


def published() -> list[Published]:
    """The six profiles of the zero-bubble paper; each rank's stage cut evenly into two."""
    found: dict[tuple[str, int, int], Published] = {}
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["TF"]:
                continue
            key = row["model"], int(row["P"]), int(row["M"])
            if key not in found:
                found[key] = _published(row)
            found[key].printed[row["schedule"]] = float(row["bubble"])
    return list(found.values())


def _published(row: dict[str, str]) -> Published:
    ranks, microbatches = int(row["P"]), int(row["M"])
    forward, back, weight, hop = (float(row[key]) / 1e3 for key in ("TF", "TB", "TW", "Tcomm"))
    costs = Costs.uniform(
        stages=2 * ranks,
        forward_s=forward / 2,
        input_grad_s=back / 2,
        weight_grad_s=weight / 2,
        activation_bytes=1e6,
        input_grad_held_bytes=1e6 * HELD_BY_W[row["model"]],
        hop_s=hop,
    )
    name = f"{row['model']}, P={ranks}, M={microbatches}"
    profile = Profile(name=name, ranks=ranks, microbatches=microbatches, costs=costs)
    return Published(model=row["model"], profile=profile, printed={})


def uneven() -> list[Profile]:
    """Profiles on which named schedules lose time, P = 8 and M = 32 unless it says otherwise."""
    eight = np.ones(16)
    drawn = np.random.default_rng(7).uniform(0.8, 1.2, size=(3, 16))
    head, first = _at(16, 15, 2.5), _at(16, 0, 2.0)
    slow = np.where(np.arange(8) == 3, 1.25, 1.0)
    layers = np.array([4, 4, 4, 4, 4, 4, 3, 3]) / 4
    smol = np.array([5, 5, 5, 5, 5, 4, 1, 8]) / 5
    return [
        _profile("even", eight, hop=0.05),
        _profile("heavy head, 2.5 stages", head, hop=0.05),
        _profile("vision encoder on stage 0", first, hop=0.05),
        _profile("embedding, encoder and head", first * _at(16, 15, 2.0), hop=0.05),
        _profile("30 layers on 4 ranks", layers, ranks=4, microbatches=16, hop=0.05),
        _profile("SmolLM2: 30 layers, head of 8", smol, ranks=4, microbatches=16, hop=0.05),
        _profile("one rank at 80 % speed, v=1", 2 * slow, hop=0.1),
        _profile("long sequence: I > F + W", eight, back=2.4, weight=0.8, hop=0.05),
        _profile("experts: W small", eight, weight=0.3, hop=0.05),
        _profile("frozen below: W only in stages 12-15", eight, weights=np.arange(16) >= 12),
        _profile("slow hops, half an F", eight, hop=0.5),
        _profile("narrow links, a third of an F", eight, hop=0.05, occupied=0.33),
        _profile("host overhead, a tenth of an F", eight, hop=0.05, overhead=0.1),
        _profile("every stage off by up to 20 %", drawn[0], hop=0.05, back=drawn[1] / drawn[0]),
        _profile("few microbatches, M = 8, heavy head", head, microbatches=8, hop=0.05),
    ]


def _at(stages: int, stage: int, weight: float) -> np.ndarray:
    return np.where(np.arange(stages) == stage, weight, 1.0)


def _profile(
    name: str,
    weights_of_stages: Sequence[float] | np.ndarray,
    *,
    ranks: int = 8,
    microbatches: int = 32,
    back: float | np.ndarray = 1.0,
    weight: float = 0.9,
    weights: np.ndarray | None = None,
    hop: float = 0.0,
    occupied: float = 0.0,
    overhead: float = 0.0,
) -> Profile:
    """F of a stage of weight 1 takes 10 ms; everything else is given in that unit."""
    unit_s, size = 0.010, np.asarray(weights_of_stages, dtype=float)
    has_weights = np.ones(len(size)) if weights is None else weights
    stages = [
        {
            "forward_s": unit_s * forward,
            "input_grad_s": unit_s * forward * times,
            "weight_grad_s": unit_s * forward * weight * has,
        }
        for forward, times, has in zip(
            size, np.broadcast_to(back, size.shape), has_weights, strict=True
        )
    ]
    costs = Costs.parse(
        {
            "stages": stages,
            "hop_s": unit_s * hop,
            "message_bytes": unit_s * occupied,
            "bandwidth_bytes_per_s": 1.0,
            "overhead_s": unit_s * overhead,
        }
    )
    return Profile(name=name, ranks=ranks, microbatches=microbatches, costs=costs)
