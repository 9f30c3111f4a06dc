"""Bytes of every rank: what stays, what comes and goes, and what no tensor accounts for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullbore.plan.load import Load
from fullbore.plan.prices import Floats, Row, StageSums
from fullbore.plan.question import Allowance
from fullbore.sim import Rehearsal

__all__ = ["Memory", "memory_of", "peak_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memory:
    """Bytes of each rank [P].

    parameters, gradients, optimizer: what training holds all the time. activations, logits: at the
    moment at which they are the most together; logits are what the loss holds. buffers: messages
    between stages. allowance: see `question.Allowance`.
    """

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    logits: Floats
    buffers: Floats
    allowance: Floats
    total: Floats

    @property
    def worst_rank(self) -> int:
        """The rank that holds the most."""
        return int(np.argmax(self.total))

    @property
    def peak_bytes(self) -> float:
        """What that one holds."""
        return float(self.total.max())


def memory_of(load: Load, rehearsal: Rehearsal, allowance: Allowance) -> Memory:
    """The memory of every rank under a schedule."""
    levels = rehearsal.levels(load.sums.rise, load.sums.change)
    peak = np.maximum.reduceat(levels, rehearsal.first)
    logits = np.zeros(len(peak))
    last = int(load.home[-1])
    logits[last] = _logits_at_peak(load.sums, rehearsal, levels, last)
    extra = allowance.context_bytes + allowance.fragmented * (peak + load.buffers)
    held = load.parameters + load.gradients + load.optimizer
    return Memory(
        parameters=load.parameters,
        gradients=load.gradients,
        optimizer=load.optimizer,
        activations=peak - logits,
        logits=logits,
        buffers=load.buffers,
        allowance=extra,
        total=held + peak + load.buffers + extra,
    )


def peak_bytes(load: Load, rehearsal: Rehearsal, allowance: Allowance) -> Floats:
    """The total of each rank [P] alone, which is what most candidates are asked for."""
    peak = np.maximum.reduceat(rehearsal.levels(load.sums.rise, load.sums.change), rehearsal.first)
    extra = allowance.context_bytes + allowance.fragmented * (peak + load.buffers)
    return load.parameters + load.gradients + load.optimizer + peak + load.buffers + extra


def _logits_at_peak(sums: StageSums, rehearsal: Rehearsal, levels: Floats, rank: int) -> float:
    """What the loss holds when this rank, the last stage's, holds the most."""
    stages = len(sums[Row.KEPT])
    kept, scratch, zero = np.zeros(stages), np.zeros(stages), np.zeros(stages)
    kept[-1], scratch[-1] = sums[Row.LOGITS][-1], sums[Row.LOGITS_SCRATCH][-1]
    rise = np.stack([kept, scratch, scratch, zero])
    change = np.stack([kept, -kept, scratch - kept, -scratch])
    first = int(rehearsal.first[rank])
    end = int(np.append(rehearsal.first, len(levels))[rank + 1])
    at = first + int(np.argmax(levels[first:end]))
    return float(rehearsal.levels(rise, change)[at])
