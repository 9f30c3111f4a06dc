"""Seconds of a step: the pipeline, gradients summed over replicas, the optimizer, and what is lost.

Gradients of a rank can travel as soon as its last microbatch's backward has made them. Overlapped,
they cost what is longer than that backward, and weights gathered (ZeRO-1) what is longer than a
first forward; else all of it comes after the rank's last action. A tied head and its embedding on
different ranks add up their gradients then. The optimizer waits for the gradients of all ranks,
whose norm it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullbore.plan.load import Load
from fullbore.plan.prices import Floats
from fullbore.sim import Rehearsal

__all__ = ["Step", "bound_s", "step_of"]

_ROUNDING = 1e-9  # sums in another order differ by less than this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of one step, which add up to `total_s`.

    pipeline_s: until the last rank's last action. reduction_s: by how much gradients make it
    longer. optimizer_s: of the slowest rank. lost_s: what waiting for the slow costs, by
    experience.
    """

    pipeline_s: float
    reduction_s: float
    optimizer_s: float
    lost_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.pipeline_s + self.reduction_s + self.optimizer_s + self.lost_s


def step_of(load: Load, rehearsal: Rehearsal, *, overlap: bool) -> Step:
    """Simulate the schedule, and add what follows it."""
    ends_s = rehearsal.ends_s(
        load.sums.seconds, hop_s=load.hop_s, occupancy_s=load.occupancy_s, overlap=overlap
    )
    return after(load, ends_s)


def after(load: Load, ends_s: Floats) -> Step:
    """The step of a pipeline whose ranks end at these times [P]."""
    pipeline_s = float(ends_s.max())
    summed_s = ends_s + load.reduction_s
    if load.tied_s:
        ends = [int(load.home[0]), int(load.home[-1])]
        summed_s[ends] = summed_s[ends].max() + load.tied_s
    return Step(
        pipeline_s=pipeline_s,
        reduction_s=float(summed_s.max()) - pipeline_s,
        optimizer_s=load.optimizer_s,
        lost_s=pipeline_s * load.step_share,
    )


def bound_s(load: Load, *, splits: bool) -> float:
    """What no step of these stages can be shorter than, whatever the order of their actions.

    A rank begins when the stages before its first one have let a microbatch through, and has all
    its work to do then. Where backwards are whole, its last action is one that the stages before
    have to follow. splits: whether they may not be.
    """
    stages, once = len(load.home), load.sums.seconds
    first = np.full(load.ranks, stages)
    np.minimum.at(first, load.home, np.arange(stages))
    before_s = np.cumsum(once[0]) - once[0]
    behind_s = np.cumsum(once[1]) - once[1]
    ends_s = before_s[first] + load.busy_s
    if not splits:
        ends_s[load.home[0]] = float((ends_s + behind_s[first]).max())
    return after(load, ends_s).total_s * (1 - _ROUNDING)
