"""Schedules as tokens, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind, Placement, Program, Schedule
from fullbore.search.instance import Instance, longest_program

__all__ = ["Tokens", "schedule_of", "tokens_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """The programs of all ranks: program [P, L] and how many tokens each has, count [P]."""

    program: npt.NDArray[np.int32]
    count: npt.NDArray[np.int64]

    def copy(self) -> Tokens:
        """The same programs in arrays of their own."""
        return Tokens(program=self.program.copy(), count=self.count.copy())

    @staticmethod
    def empty(instance: Instance) -> Tokens:
        """Room for any programs of this instance."""
        return Tokens(
            program=np.zeros((instance.ranks, longest_program(instance)), dtype=np.int32),
            count=np.zeros(instance.ranks, dtype=np.int64),
        )


def tokens_of(schedule: Schedule, instance: Instance) -> Tokens:
    """The order of a schedule's F, B, I and W (the microbatches are taken in order)."""
    tokens = Tokens.empty(instance)
    for rank, program in enumerate(schedule.programs):
        compute = program.select(program.kind <= Kind.W)
        tokens.program[rank, : len(compute)] = compute.stage * 4 + compute.kind
        tokens.count[rank] = len(compute)
    return tokens


def schedule_of(tokens: Tokens, placement: Placement, *, microbatches: int, name: str) -> Schedule:
    """The schedule that these tokens stand for."""
    return Schedule(
        name=name,
        microbatches=microbatches,
        placement=placement,
        programs=tuple(
            _program(tokens.program[rank, : tokens.count[rank]]) for rank in range(placement.ranks)
        ),
    )


def _program(tokens: npt.NDArray[np.int32]) -> Program:
    """Number the tokens: the k-th F, backward and W of a stage; a W takes its I's microbatch."""
    kind, stage = (tokens & 3).astype(np.int8), (tokens >> 2).astype(np.int32)
    microbatch = np.zeros(len(tokens), dtype=np.int32)
    for s in np.unique(stage).tolist():
        here = stage == s
        backward = here & ((kind == Kind.B) | (kind == Kind.I))
        for chosen in (here & (kind == Kind.F), backward):
            microbatch[chosen] = np.arange(int(chosen.sum()))
        microbatch[here & (kind == Kind.W)] = microbatch[here & (kind == Kind.I)]
    return Program(kind=kind, stage=stage, microbatch=microbatch)
