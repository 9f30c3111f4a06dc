"""A schedule: one program of actions per rank, and the placement of stages on ranks.

Programs are arrays, because millions of actions flow through passes, laws and the simulator;
single actions are made only where a person looks at them. A schedule knows no time, no bytes
and no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fullbore.errors import NotationError
from fullbore.files import replace_file
from fullbore.ir.action import Action, Kind
from fullbore.ir.placement import Placement

__all__ = ["FlatSchedule", "Program", "Schedule"]

KindArray = npt.NDArray[np.int8]
IndexArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What one rank does, in order: three arrays of one length [n]."""

    kind: KindArray
    stage: IndexArray
    microbatch: IndexArray

    @staticmethod
    def of(actions: Iterable[Action]) -> Program:
        """Make a program from single actions."""
        listed = list(actions)
        return Program(
            kind=np.array([a.kind for a in listed], dtype=np.int8),
            stage=np.array([a.stage for a in listed], dtype=np.int32),
            microbatch=np.array([a.microbatch for a in listed], dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, index: int) -> Action:
        return Action(
            stage=int(self.stage[index]),
            kind=Kind(int(self.kind[index])),
            microbatch=int(self.microbatch[index]),
        )

    def __iter__(self) -> Iterator[Action]:
        for kind, stage, microbatch in zip(
            self.kind.tolist(), self.stage.tolist(), self.microbatch.tolist(), strict=True
        ):
            yield Action(stage=stage, kind=Kind(kind), microbatch=microbatch)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Program)
            and np.array_equal(self.kind, other.kind)
            and np.array_equal(self.stage, other.stage)
            and np.array_equal(self.microbatch, other.microbatch)
        )

    def __hash__(self) -> int:
        return hash((self.kind.tobytes(), self.stage.tobytes(), self.microbatch.tobytes()))

    def __str__(self) -> str:
        return " ".join(str(action) for action in self)

    def select(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Program:
        """The actions at these positions (a mask or indices), in that order."""
        return Program(
            kind=self.kind[chosen], stage=self.stage[chosen], microbatch=self.microbatch[chosen]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatSchedule:
    """All programs one after the other: rank r's actions are at offsets[r]:offsets[r + 1].

    An index into these arrays [N] names an action of the whole schedule.
    """

    kind: KindArray
    stage: IndexArray
    microbatch: IndexArray
    rank: IndexArray
    offsets: npt.NDArray[np.int64]  # [P + 1]

    def action(self, index: int) -> Action:
        """The action at a flat index."""
        return Action(
            stage=int(self.stage[index]),
            kind=Kind(int(self.kind[index])),
            microbatch=int(self.microbatch[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule as a value.

    name: how it is called on the command line. microbatches: M. programs: one a rank; either
    compute actions only, or with sends and receives in place (see `passes.insert_communication`).
    slices: how many slices each sequence is cut into. With more than one, what actions call a
    microbatch is a slice, `microbatches` counts those, and slices k*m to k*m + k-1 make a sequence,
    each of which attends to the ones before it.
    Two schedules are equal when they do the same, whatever their names.
    """

    name: str = field(compare=False)
    microbatches: int
    placement: Placement
    programs: tuple[Program, ...]
    slices: int = 1

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.programs)

    @property
    def stages(self) -> int:
        """S, stages of the whole model."""
        return self.placement.stages

    @property
    def virtual_stages(self) -> int:
        """v, the largest number of stages that one rank holds."""
        return int(np.bincount(self.placement.tables.ravel()).max())

    @property
    def has_communication(self) -> bool:
        """Whether sends and receives are written out."""
        return any(bool((program.kind >= Kind.SEND_F).any()) for program in self.programs)

    def has(self, kind: Kind, *, stage: int | None = None) -> bool:
        """Whether there is any such action, of one stage if that is given."""
        return any(
            bool(((p.kind == kind) & ((p.stage == stage) | (stage is None))).any())
            for p in self.programs
        )

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return self.has(Kind.I)

    @property
    def offloads(self) -> bool:
        """Whether any activations leave for the host and come back."""
        return self.has(Kind.OFFLOAD)

    @property
    def activation_unit(self) -> float:
        """What one stage and microbatch (or slice) holds, in microbatches x 1/P of the model."""
        return self.ranks / (self.stages * self.slices)

    @property
    def actions(self) -> int:
        """N, how many actions all programs have together."""
        return sum(len(program) for program in self.programs)

    def flat(self) -> FlatSchedule:
        """All programs joined into arrays [N]."""
        lengths = [len(program) for program in self.programs]
        return FlatSchedule(
            kind=np.concatenate([p.kind for p in self.programs]),
            stage=np.concatenate([p.stage for p in self.programs]),
            microbatch=np.concatenate([p.microbatch for p in self.programs]),
            rank=np.repeat(np.arange(self.ranks, dtype=np.int32), lengths),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {program}" for r, program in enumerate(self.programs))

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write PyTorch's CSV format, a row a rank (compute only, or with sends and receives)."""
        from fullbore.ir.text import to_text

        replace_file(path, to_text(self).encode())

    @staticmethod
    def from_csv(path: str | PathLike[str]) -> Schedule:
        """Read PyTorch's CSV format, both of its variants; NotationError names line and column."""
        from fullbore.ir.text import from_text, read_text

        text = read_text(path)
        try:
            return from_text(text, name=Path(path).stem)
        except NotationError as error:
            raise NotationError(f"{path}: {error}") from None
