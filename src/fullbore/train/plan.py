"""What a run will be, decided from settings and the model's configuration before anything starts.

The launcher makes this plan to refuse early, and every rank makes it again, the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullbore.errors import ConfigError
from fullbore.ir import Schedule
from fullbore.train.anatomy import Anatomy, examine
from fullbore.train.balance import PieceCosts, balance, piece_costs
from fullbore.train.build import empty_model
from fullbore.train.carried import check_slices
from fullbore.train.settings import TrainSettings
from fullbore.train.sources import read_config
from fullbore.train.stages import Part, parts_of

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A model, how it is cut, and the schedule that it runs on.

    folder: with configuration, tokenizer and weights. parts: one a stage, in the model's order.
    """

    folder: Path
    config: Any
    anatomy: Anatomy
    costs: PieceCosts
    parts: tuple[Part, ...]
    schedule: Schedule

    def describe(self) -> list[str]:
        """One line a stage: what it holds, where, and its share of the compute."""
        total = self.costs.embedding + sum(self.costs.layers) + self.costs.head
        lines = []
        for part in self.parts:
            held = range(part.first_layer, part.end_layer)
            cost = sum(self.costs.layers[layer] for layer in held)
            pieces = ["embedding"] if part.is_first else []
            pieces += [_layers(held)] if held else []
            pieces += ["head"] if part.is_last else []
            cost += self.costs.embedding * part.is_first + self.costs.head * part.is_last
            rank = self.schedule.placement.stage_to_rank[part.stage]
            share = f"{cost / total:.1%}" if total else "?"
            lines.append(f"stage {part.stage} on rank {rank}: {', '.join(pieces)} ({share})")
        return lines


def _layers(held: range) -> str:
    return f"layers {held[0]}-{held[-1]}" if len(held) > 1 else f"layer {held[0]}"


def _check_length(config: Any, seq_length: int) -> None:
    """A model is made for so many positions; some fail beyond them, others just predict badly."""
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < seq_length:
        raise ConfigError(
            f"--seq-length is {seq_length}, and the model has {most} positions: the nearest legal "
            f"value is {most}"
        )


def _check_recomputed(settings: TrainSettings, parts: Sequence[Part]) -> None:
    """More layers than any stage has would be all of them, which has a name of its own."""
    asked, most = settings.recomputation, max(part.layers for part in parts)
    if isinstance(asked, int) and asked > most:
        said, all_of_it = "--recompute-num-layers", "--recompute-method uniform"
        if settings.recompute is not None:
            said, all_of_it = "--recompute", "--recompute full"
        raise ConfigError(
            f"{said} is {asked}, and no stage has more than {most} layers: the nearest legal value "
            f"is {most}; for all layers give {all_of_it}"
        )


def make_plan(settings: TrainSettings, folder: Path, *, schedule: Schedule | None = None) -> Plan:
    """Cut the model of a folder as the settings ask.

    schedule: one that no name stands for, instead of the settings' own. Raises ModelError, or
    ConfigError and ScheduleError naming the nearest legal values.
    """
    config = read_config(folder)
    _check_length(config, settings.seq_length)
    whole = empty_model(config)
    anatomy = examine(empty_model(config))
    costs = piece_costs(whole, anatomy, seq_length=settings.seq_length)
    if schedule is None:
        shape = settings.shape(anatomy.layers)
        schedule, layers = settings.placed(shape.build()), shape.layers
    else:
        layers = settings.stage_layers
    if schedule.slices > 1:
        check_slices(whole)
    parts = parts_of(anatomy, layers or balance(costs, stages=schedule.stages))
    _check_recomputed(settings, parts)
    return Plan(
        folder=folder,
        config=config,
        anatomy=anatomy,
        costs=costs,
        parts=parts,
        schedule=schedule,
    )
