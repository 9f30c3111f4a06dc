"""The laws about computation: what there must be, where, and in which order on a rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fullbore.ir import COMPUTE_KINDS, COPY_KINDS, Kind
from fullbore.verify.case import Case
from fullbore.verify.violation import Finding

__all__ = ["complete", "known", "live_activations", "ordered", "placed"]


def known(case: Case) -> Iterator[Finding]:
    """Every action names a stage of the placement and one of the M microbatches."""
    flat, schedule = case.flat, case.schedule
    stranger = (flat.stage < 0) | (flat.stage >= schedule.stages)
    for index in np.flatnonzero(stranger).tolist():
        yield case.at(
            index,
            detail=f"there is no stage {flat.stage[index]}: stages are 0..{schedule.stages - 1}",
            remedy="correct the stage, or give it a rank in the placement",
        )
    foreign = (flat.microbatch < 0) | (flat.microbatch >= schedule.microbatches)
    for index in np.flatnonzero(foreign).tolist():
        yield case.at(
            index,
            detail=f"there is no microbatch {flat.microbatch[index]}: microbatches are "
            f"0..{schedule.microbatches - 1}",
            remedy="correct the microbatch, or raise the schedule's number of them",
        )


def placed(case: Case) -> Iterator[Finding]:
    """Every action stands on the rank that holds its stage."""
    home = case.homes[case.flat.microbatch % len(case.homes), case.flat.stage]
    for index in np.flatnonzero(home != case.flat.rank).tolist():
        yield case.at(
            index,
            detail=f"stage {case.flat.stage[index]} is on rank {home[index]}"
            f"{_of_copy(case, index)}",
            remedy=f"move it to rank {home[index]}, or change the placement",
        )


def _of_copy(case: Case, index: int) -> str:
    """Where there are several copies of the model, for which microbatches that holds."""
    copies = len(case.homes)
    number = case.flat.microbatch[index] % copies
    return "" if copies == 1 else f" for microbatches {number}, {number + copies}, ..."


def complete(case: Case) -> Iterator[Finding]:
    """Every stage and microbatch has one F, one B or one I and one W, and at most one R.

    Instead of an R it may have one OFFLOAD and one RELOAD.
    """
    for kind in (*COMPUTE_KINDS, *COPY_KINDS):
        for index in case.repeated(kind).tolist():
            yield case.at(index, detail="occurs a second time", remedy="delete one of the two")
    for stage, microbatch in np.argwhere(case.counts(Kind.F) == 0).tolist():
        yield case.missing(Kind.F, stage, microbatch, why="every stage needs one a microbatch")
    whole, inputs, weights = (case.counts(kind) > 0 for kind in (Kind.B, Kind.I, Kind.W))
    for stage, microbatch in np.argwhere(~(whole | inputs | weights)).tolist():
        yield case.missing(Kind.B, stage, microbatch, why="there is neither a B nor an I and a W")
    away, back = (case.counts(kind) > 0 for kind in COPY_KINDS)
    for kind, other, needs_it in (
        (Kind.I, Kind.W, weights & ~inputs & ~whole),
        (Kind.W, Kind.I, inputs & ~weights & ~whole),
        (Kind.OFFLOAD, Kind.RELOAD, back & ~away),
        (Kind.RELOAD, Kind.OFFLOAD, away & ~back),
    ):
        for stage, microbatch in np.argwhere(needs_it).tolist():
            yield case.missing(kind, stage, microbatch, why=f"{other.name} is there without it")
    yield from _twice_backward(case)
    yield from _both_made_again_and_brought_back(case, away | back)


def _twice_backward(case: Case) -> Iterator[Finding]:
    """A split backward beside a whole one."""
    flat, whole = case.flat, case.counts(Kind.B) > 0
    split = (flat.kind == Kind.I) | (flat.kind == Kind.W)
    beside = whole[flat.stage[split], flat.microbatch[split]]
    for index in np.flatnonzero(split)[beside].tolist():
        yield case.at(
            index,
            detail=f"{flat.stage[index]}B{flat.microbatch[index]}, a whole backward, is there too",
            remedy="delete one: either B, or I and W",
        )


def _both_made_again_and_brought_back(
    case: Case, copied: npt.NDArray[np.bool_]
) -> Iterator[Finding]:
    """An R beside an OFFLOAD or RELOAD; copied: [S, M], where there is one of these."""
    flat = case.flat
    again = flat.kind == Kind.R
    beside = copied[flat.stage[again], flat.microbatch[again]]
    for index in np.flatnonzero(again)[beside].tolist():
        yield case.at(
            index,
            detail="the same activations leave for the host, or come back from it, too",
            remedy="delete one: either R, or OFFLOAD and RELOAD",
        )


def ordered(case: Case) -> Iterator[Finding]:
    """On a rank, what an action needs stands before it."""
    flat = case.flat
    for needed in (case.needs.value, case.needs.stored, case.needs.carried):
        position = np.arange(len(needed))
        late = (needed > position) & (flat.rank[needed] == flat.rank)
        for index in np.flatnonzero(late).tolist():
            source = int(needed[index])
            yield case.at(
                index,
                detail=f"needs {flat.action(source)}, which stands after it, "
                f"at index {case.index(source)}",
                remedy=f"move {flat.action(source)} before it",
            )


def live_activations(case: Case) -> Iterator[Finding]:
    """A rank never holds more activations than its limit.

    A stage and microbatch is live from its F until its B (or W) is done and counts P/S, in
    microbatches x 1/P of the model; where there is an R, only from there, since what the forward
    keeps for it is little; and not from its OFFLOAD to its RELOAD. A rank does one thing at a
    time, so its program alone decides this, but for copies, which are taken to be done at once
    here: while one lasts, what it moves is in memory too (`timeline.live_curves` says how much).
    """
    if case.peak_limits is None:
        return
    flat, schedule = case.flat, case.schedule
    unit = schedule.activation_unit
    counts = {Kind.F: 1, Kind.R: 1, Kind.RELOAD: 1, Kind.B: -1, Kind.W: -1, Kind.OFFLOAD: -1}
    change = np.array([counts.get(kind, 0) for kind in Kind])[flat.kind]
    again = case.counts(Kind.R)[flat.stage, flat.microbatch] > 0
    change[again & (flat.kind == Kind.F)] = 0
    for rank, limit in enumerate(case.peak_limits):
        start, stop = flat.offsets[rank : rank + 2]
        live = np.cumsum(change[start:stop]) * unit
        above = np.flatnonzero(live > limit * (1 + 1e-9))
        if len(above):
            yield case.at(
                int(start + above[0]),
                detail=f"raises live activations to {live[above[0]]:g} microbatches x 1/P of the "
                f"model, over the limit of {limit:g} (the rank's peak is {live.max():g})",
                remedy=f"put a backward before it, or raise the limit to {live.max():g}",
            )
