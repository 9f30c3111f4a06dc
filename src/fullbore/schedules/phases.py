"""One rank's program from phases, as papers write them: "F0" three times, "F1 I1 W" twice, ...

A word is a kind and one of the rank's stages (0: its first). Microbatches are not written: each
word takes the next one of its kind and stage, and a `W` that of the oldest I which has none yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.ir import Kind, Program

__all__ = ["Phase", "numbered", "program_of"]

Indices = npt.NDArray[np.int64]
KindArray = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Phase:
    """Words, separated by blanks, and how many times they stand one after the other."""

    words: str
    times: int


def program_of(phases: Iterable[Phase], *, stages: Sequence[int]) -> Program:
    """The program of a rank that holds these stages; the words call the first one 0."""
    written = [(np.array([_parse(w) for w in p.words.split()]), p.times) for p in phases]
    words = np.concatenate([np.tile(pattern, (times, 1)) for pattern, times in written])
    return numbered(kind=words[:, 0].astype(np.int8), own=words[:, 1], stages=stages)


def numbered(*, kind: KindArray, own: Indices, stages: Sequence[int]) -> Program:
    """The program with these kinds [n] for these of the rank's stages [n], W's are not looked at.

    Each stage takes its microbatches in order; B and I of one stage draw on the same ones.
    """
    own, microbatch = own.copy(), np.empty(len(kind), dtype=np.int32)
    backward = (kind == Kind.B) | (kind == Kind.I)
    for stage in range(len(stages)):
        for chosen in (kind == Kind.F, backward):
            at = np.flatnonzero(chosen & (own == stage))
            microbatch[at] = np.arange(len(at))
    halves, weights = np.flatnonzero(kind == Kind.I), np.flatnonzero(kind == Kind.W)
    own[weights], microbatch[weights] = own[halves], microbatch[halves]
    return Program(kind=kind, stage=np.array(stages, dtype=np.int32)[own], microbatch=microbatch)


def _parse(word: str) -> tuple[int, int]:
    return Kind[word[0]], int(word[1:] or 0)
