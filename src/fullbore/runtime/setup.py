"""What stays the same over all lives of a pipeline on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fullbore.ir import Schedule
from fullbore.runtime.device import Side
from fullbore.runtime.meeting import Patience
from fullbore.runtime.recompute import Recompute
from fullbore.runtime.stage import CountFunction, LossFunction
from fullbore.runtime.wiring import Rendezvous
from fullbore.verify import LinkUse

__all__ = ["Setup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What stays the same over all lives of a pipeline on one rank.

    programs: for training (True) and evaluation (False), sends and receives in place. uses: what
    each asks of this rank's links. pairs: all directed pairs of ranks that talk. count_fn: see
    `Pipeline`. reduce_dtype: in which gradients are summed over replicas.
    records: the folder for flight records. offload_folder: see `Pipeline`.
    """

    rendezvous: Rendezvous
    side: Side
    stages: Mapping[int, nn.Module]
    programs: Mapping[bool, Schedule]
    uses: Mapping[bool, Sequence[LinkUse]]
    pairs: Sequence[tuple[int, int]]
    tied: Sequence[Mapping[int, str]]
    loss_fn: LossFunction | None
    mean: bool
    overlap: bool
    static_shapes: bool
    main_grad_dtype: torch.dtype | None = None
    recompute: Recompute = "none"
    count_fn: CountFunction | None = None
    reduce_dtype: torch.dtype | None = None
    patience: Patience
    records: Path | None = None
    offload_folder: Path | None = None

    @property
    def schedule(self) -> Schedule:
        """The training schedule."""
        return self.programs[True]

    def holds(self, stage: int) -> bool:
        """Whether this rank holds a stage; -1 is the last one."""
        return stage % self.schedule.stages in self.stages
