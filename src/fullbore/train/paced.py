"""A job whose stages sleep: as many ranks as wanted on few cores, everything but compute real.

An action counts as busy for its nominal time, and what it takes longer, waking up included, is
host time; otherwise a tired machine would look well filled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fullbore.compare import Length, Setting
from fullbore.cost import Costs
from fullbore.ir import Kind, Schedule
from fullbore.runtime import PacedStage, Pipeline, paced_loss, wake_on_time
from fullbore.timeline import Timeline
from fullbore.train.comparison import Machine, Made, Stepped
from fullbore.train.team import Team

__all__ = ["PacedJob", "PacedRunner", "nominal"]

_ITEM_BYTES = 4  # float32


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedJob:
    """Sleeping stages under each of some schedules, whose backwards are whole.

    costs: for each schedule, how long its stages sleep; pace says so in words. message_bytes: of
    each activation and gradient.
    """

    schedules: tuple[Schedule, ...]
    costs: tuple[Costs, ...]
    pace: str
    message_bytes: int
    overlap: bool
    length: Length
    device: str = "cpu"
    threads: int | None = 1

    @property
    def imports(self) -> tuple[str, ...]:
        """What every rank needs."""
        return (__name__,)

    def make(self, index: int, machine: Machine) -> Made:
        """The sleepers of one schedule on this rank."""
        schedule = self.schedules[index]
        setting = Setting(
            ranks=schedule.ranks,
            microbatches=schedule.microbatches // schedule.slices,
            steps=self.length.steps,
            warmup_steps=self.length.warmup_steps,
            overlap=self.overlap,
            device="cpu",
            cores=machine.cores,
            threads=machine.threads,
            message_bytes=self.message_bytes,
            pace=self.pace,
        )
        runner = PacedRunner(
            schedule,
            self.costs[index],
            machine.team,
            message_bytes=self.message_bytes,
            overlap=self.overlap,
        )
        return Made(runner=runner, setting=setting)


class PacedRunner:
    """One rank's paced stages under one schedule."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        team: Team,
        *,
        message_bytes: int,
        overlap: bool,
    ) -> None:
        """costs: how long each stage sleeps; message_bytes: of each activation and gradient."""
        wake_on_time()
        self.schedule, self._costs = schedule, costs
        self._batch = _batch(schedule, message_bytes)
        slices = schedule.slices
        self._pipe = Pipeline(
            stages={
                stage: PacedStage(
                    forward_s=costs.stages[stage].forward_s / slices,
                    backward_s=costs.stages[stage].backward_s / slices,
                    weight_grad_s=_share(costs.stages[stage].weight_grad_s, slices),
                )
                for stage in schedule.placement.stages_of(team.rank)
            },
            schedule=schedule,
            loss_fn=paced_loss,
            overlap_p2p=overlap,
            record=True,
        )

    def evaluate(self) -> None:
        """Nothing is computed that could be right or wrong."""

    def step(self) -> Stepped:
        """One step; the timeline is the nominal one."""
        result = self._pipe.step(self._batch, self._batch)
        assert result.timeline is not None
        return Stepped(
            step_s=result.step_s,
            loss=None,
            timeline=nominal(result.timeline, self._costs, slices=self.schedule.slices),
            peak_activation_bytes=None,
            stage_activation_bytes=None,
            stage_held_bytes=None,
            stage_input_bytes=None,
        )

    def close(self) -> None:
        """Let go of the pipeline."""
        self._pipe.close()


def _batch(schedule: Schedule, message_bytes: int) -> torch.Tensor:
    """Zeros [M, n] that make messages of so many bytes a microbatch, of each slice its share."""
    items = max(1, message_bytes // _ITEM_BYTES // schedule.slices) * schedule.slices
    return torch.zeros(schedule.microbatches // schedule.slices, items)


def _share(seconds: float | None, slices: int) -> float | None:
    return None if seconds is None else seconds / slices


def nominal(timeline: Timeline, costs: Costs, *, slices: int = 1) -> Timeline:
    """A paced timeline in which each F, B, I and W lasts as long as its stage's costs say, of a
    slice its share.

    It keeps its end, since a sleeper is late in beginning and in nothing after.
    """
    duration_s = np.full((len(Kind), len(costs.stages)), np.inf)
    duration_s[Kind.F] = [stage.forward_s for stage in costs.stages]
    duration_s[Kind.B] = [stage.backward_s for stage in costs.stages]
    if all(stage.is_split for stage in costs.stages):
        duration_s[Kind.I] = [stage.input_grad_s for stage in costs.stages]
        duration_s[Kind.W] = [stage.weight_grad_s for stage in costs.stages]
    latest_s = timeline.end_s - duration_s[timeline.kind, timeline.stage] / slices
    return replace(timeline, start_s=np.maximum(timeline.start_s, latest_s))
