"""How much each rank may hold, as a person says it, and what each action does to it.

    8        8 microbatches x 1/P of the model on every rank, the unit of every peak in Fullbore
    0.5x     half of what 1F1B holds on its worst rank
    40GB     bytes (also kB, MB, TB and KiB, MiB, GiB, TiB); the costs must name activation_bytes
    40GB,60GB,60GB,50GB    a limit for each rank, where they have not equally much room

What counts, and when, is what `verify` and `live_curves` count: a stage's activations from the
start of F until the end of B; where the backward is split, what the costs say is held instead
from the end of I to the end of W; where a stage recomputes, its input until the backward starts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fullbore.cost.costs import Costs, StageCosts
from fullbore.cost.recut import recut
from fullbore.errors import ConfigError, CostsError
from fullbore.ir import Kind

__all__ = ["ROUNDING", "Footprint", "MemoryLimit"]

Floats = npt.NDArray[np.float64]

_POWERS = {"k": 1, "M": 2, "G": 3, "T": 4}
_TEXT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(x|[kKMGT]?i?B)?")

ROUNDING = 1e-9
"""The share of a limit that rounding may add up to, as in `verify`."""


Unit = Literal["microbatches", "1f1b", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The most that ranks may hold, in one unit: one amount for every rank, or one for each."""

    amounts: tuple[float, ...]
    unit: Unit

    @staticmethod
    def parse(text: str) -> MemoryLimit:
        """Read `8`, `0.5x` or `40GB`, or several of a kind with commas between them; ConfigError
        for anything else, or for nothing at all.
        """
        read = [_parse(part) for part in text.split(",")]
        if len({unit for _, unit in read}) > 1:
            raise ConfigError(
                f"a memory limit of {text.strip()[:40]!r} mixes units: say every rank's in one"
            )
        return MemoryLimit(amounts=tuple(amount for amount, _ in read), unit=read[0][1])

    def __str__(self) -> str:
        amounts = ", ".join(f"{amount:g}" for amount in self.amounts)
        if self.unit == "microbatches":
            return f"{amounts} microbatches x 1/P of the model"
        return f"{amounts}x 1F1B's" if self.unit == "1f1b" else f"{amounts} bytes"

    def times(self, factor: float) -> MemoryLimit:
        """So many times as much for every rank."""
        return replace(self, amounts=tuple(amount * factor for amount in self.amounts))

    def counts_bytes(self, costs: Costs) -> bool:
        """Whether it is bytes that are counted; CostsError where the costs name none."""
        named = [stage.activation_bytes is not None for stage in costs.stages]
        if self.unit == "bytes" and not all(named):
            raise CostsError(
                f"a memory limit in bytes needs activation_bytes of every stage, and stage "
                f"{named.index(False)} names none: add them, or give the limit in microbatches"
            )
        return self.unit != "microbatches" and all(named)

    def resolve(self, costs: Costs, *, ranks: int, microbatches: int) -> Floats:
        """Each rank's limit [P] in bytes, or in microbatches x 1/P of the model (`counts_bytes`).

        Raises ConfigError where there are several amounts, and not one for each rank.
        """
        if len(self.amounts) not in (1, ranks):
            raise ConfigError(
                f"{len(self.amounts)} memory limits for {ranks} ranks: give one for all of them, "
                "or one for each"
            )
        amounts = np.full(ranks, self.amounts)
        if self.unit != "1f1b":
            return amounts
        held = np.array([float(min(ranks - r, microbatches)) for r in range(ranks)])
        if self.counts_bytes(costs):
            stages = recut(costs, stages=ranks).stages
            held *= [_held(stage) for stage in stages]
        return amounts * float(held.max())


def _parse(text: str) -> tuple[float, Unit]:
    """One amount and its unit."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or float(match[1]) == 0.0:
        raise ConfigError(
            f"a memory limit of {text.strip()[:40]!r} means nothing: write 8 (microbatches x "
            "1/P of the model on every rank), 0.5x (of what 1F1B holds), or bytes such as 40GB; "
            "or one for each rank, with commas between them"
        )
    amount, unit = float(match[1]), match[2]
    if unit is None:
        return amount, "microbatches"
    if unit == "x":
        return amount, "1f1b"
    base = 1024 if "i" in unit else 1000
    return amount * base ** _POWERS.get(unit[0].replace("K", "k"), 0), "bytes"


def _held(stage: StageCosts) -> float:
    """Bytes from F to the backward, the latter included."""
    return max(stage.activation_bytes or 0.0, stage.recompute_input_bytes or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What actions hold: arrays [4 * S] by stage * 4 + kind (F, B, I, W).

    rise: how far above what was held before the action its rank gets while the action runs.
    change: what it leaves. limit [P]: of each rank, in the same unit, rounding allowed for.
    """

    rise: Floats
    change: Floats
    limit: Floats

    @staticmethod
    def of(costs: Costs, limit: MemoryLimit | None, *, ranks: int, microbatches: int) -> Footprint:
        """The footprint of every action of these costs; one entry a stage of the placement."""
        stages = len(costs.stages)
        in_bytes = limit is not None and limit.counts_bytes(costs)
        rise, change = np.zeros((stages, 4)), np.zeros((stages, 4))
        for s, stage in enumerate(costs.stages):
            rise[s], change[s] = _of_stage(stage) if in_bytes else _of_share(ranks / stages)
        amounts = np.full(ranks, math.inf)
        if limit is not None:
            amounts = limit.resolve(costs, ranks=ranks, microbatches=microbatches)
        return Footprint(rise=rise.ravel(), change=change.ravel(), limit=amounts * (1 + ROUNDING))


def _of_stage(stage: StageCosts) -> tuple[list[float], list[float]]:
    whole = stage.activation_bytes or 0.0
    halved = whole if stage.input_grad_held_bytes is None else stage.input_grad_held_bytes
    before = whole if stage.recompute_input_bytes is None else stage.recompute_input_bytes
    return _by_kind(whole, halved, before)


def _of_share(share: float) -> tuple[list[float], list[float]]:
    return _by_kind(share, share, share)


def _by_kind(whole: float, halved: float, before: float) -> tuple[list[float], list[float]]:
    """Rise and change of F, B, I and W from what is held in the backward, after I, and after F."""
    assert (Kind.F, Kind.B, Kind.I, Kind.W) == (0, 1, 2, 3)
    rise = [before, whole - before, max(whole, halved) - before, 0.0]
    return rise, [before, -before, halved - before, -halved]
