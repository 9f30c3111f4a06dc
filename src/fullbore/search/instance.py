"""One placement, its costs and limits as arrays: what the kernels of the search work on.

A program is an array of tokens, stage * 4 + kind (F, B, I, W). Microbatches are not written: the
k-th F of a stage is microbatch k's, and so are the k-th backward and W. Nothing is lost by it.
All microbatches of a stage are alike, so in any schedule the k-th F of a stage may be given to the
k-th microbatch that reaches it, and starts no later for it; the same holds for backwards, and what
a rank holds depends on how many are under way, not on which.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fullbore.cost import Costs
from fullbore.errors import CostsError
from fullbore.ir import Kind, Placement
from fullbore.search.memory import ROUNDING, Footprint

__all__ = ["Instance", "Work", "has_room", "instance_of", "work_for"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


class Instance(NamedTuple):
    """Everything that decides about a program, in arrays (P ranks, S stages, M microbatches).

    home [S]: rank of a stage. own [S], first [P + 1]: the stages rank by rank, rank r's at
    first[r]:first[r + 1]. duration_s, rise, change [4 * S]: by token. limit [P], in the unit of
    rise. reserve [S]: what must stay free on the rank when a forward of this stage is let in, so
    that no microbatch is ever stuck (see `construct`). link [2, S]: the directed link on which a
    stage sends its output to the next stage, and its gradient to the previous one, or -1 where the
    two share a rank. splits: whether I and W have times.
    """

    ranks: int
    stages: int
    microbatches: int
    home: Indices
    own: Indices
    first: Indices
    duration_s: Floats
    rise: Floats
    change: Floats
    limit: Floats
    reserve: Floats
    link: Indices
    links: int
    lead_s: float
    occupancy_s: float
    hop_s: float
    splits: bool


class Work(NamedTuple):
    """What an evaluation says of programs, and its scratch; see `evaluate`."""

    start_s: Floats  # [P, L]
    idle_s: Floats  # [P, L] for how long the rank has waited, this token's wait included
    number: npt.NDArray[np.int32]  # [P, L] microbatch of a forward or backward
    clock_s: Floats  # [P] when each rank ends
    busy_s: Floats  # [P] seconds of each rank's tokens, host overhead included (`is_legal`)
    sent_s: Floats  # [2, S, M] when a stage's result is made, or its message has left
    place: Indices  # [2, S, M] where in its program a forward, or a backward, stands
    tail_s: Floats  # [P, L] the longest chain from a token's end to what counts (`fill_tails`)
    live: Floats  # [P, L] what the rank holds before a token (`is_legal`, and the next two)
    flying: npt.NDArray[np.int32]  # [P, L] before it: forwards of its stage without a backward
    pending: npt.NDArray[np.int32]  # [P, L] before it: I of its stage without their W
    position: Indices  # [P] how far each rank came
    done: Indices  # [3, S] forwards, backwards, weight gradients done
    from_position: Indices  # [P] where the evaluation began, and below with what
    from_done: Indices  # [2, S]
    split: Indices  # [S] how many of the backwards were I
    awaited: Indices  # [P]
    runnable: Indices  # [P]
    link_free_s: Floats  # [links]
    ready_s: Floats  # [2, S, M] when an input is there: of `construct`


def instance_of(
    costs: Costs, placement: Placement, *, microbatches: int, footprint: Footprint
) -> Instance:
    """The arrays of a placement; CostsError where `costs` do not have an entry a stage."""
    if len(costs.stages) != placement.stages:
        raise CostsError(
            f"the costs describe {len(costs.stages)} stages, the placement has {placement.stages}"
        )
    home = np.array(placement.stage_to_rank, dtype=np.int64)
    own = np.argsort(home, kind="stable").astype(np.int64)
    first = np.searchsorted(home[own], np.arange(placement.ranks + 1)).astype(np.int64)
    link, links = _links(home, placement.ranks)
    return Instance(
        ranks=placement.ranks,
        stages=placement.stages,
        microbatches=microbatches,
        home=home,
        own=own,
        first=first,
        duration_s=_durations(costs),
        rise=footprint.rise,
        change=footprint.change,
        limit=_limits(home, footprint, microbatches),
        reserve=_reserves(home, footprint),
        link=link,
        links=links,
        lead_s=float(costs.overhead_s),
        occupancy_s=float(costs.occupancy_s),
        hop_s=float(costs.hop_s),
        splits=all(stage.is_split for stage in costs.stages),
    )


def has_room(instance: Instance) -> bool:
    """Whether every rank has room for one microbatch on all of its stages, in whatever order."""
    kept = instance.rise.reshape(-1, 4)[:, Kind.F]
    backward = instance.rise.reshape(-1, 4)[:, Kind.B]
    if instance.splits:
        backward = np.minimum(backward, instance.rise.reshape(-1, 4)[:, Kind.I])
    for rank in range(instance.ranks):
        own = instance.own[instance.first[rank] : instance.first[rank + 1]]
        peaks = np.cumsum(kept[own]) + np.maximum(0.0, backward[own])
        if peaks.max() > instance.limit[rank]:
            return False
    return True


def work_for(instance: Instance) -> Work:
    """Space for evaluations of an instance; one search reuses it for every one."""
    ranks, stages = instance.ranks, instance.stages
    tokens, cells = (ranks, longest_program(instance)), (2, stages, instance.microbatches)
    return Work(
        start_s=np.zeros(tokens),
        idle_s=np.zeros(tokens),
        number=np.zeros(tokens, dtype=np.int32),
        clock_s=np.zeros(ranks),
        busy_s=np.zeros(ranks),
        sent_s=np.zeros(cells),
        place=np.zeros(cells, dtype=np.int64),
        tail_s=np.zeros(tokens),
        live=np.zeros(tokens),
        flying=np.zeros(tokens, dtype=np.int32),
        pending=np.zeros(tokens, dtype=np.int32),
        position=np.zeros(ranks, dtype=np.int64),
        done=np.zeros((3, stages), dtype=np.int64),
        from_position=np.zeros(ranks, dtype=np.int64),
        from_done=np.zeros((2, stages), dtype=np.int64),
        split=np.zeros(stages, dtype=np.int64),
        awaited=np.zeros(ranks, dtype=np.int64),
        runnable=np.zeros(ranks, dtype=np.int64),
        link_free_s=np.zeros(max(1, instance.links)),
        ready_s=np.zeros(cells),
    )


def longest_program(instance: Instance) -> int:
    """L, tokens of the longest program there can be: F, I and W of all its stages."""
    return int(np.diff(instance.first).max()) * instance.microbatches * 3 + 1


def _durations(costs: Costs) -> Floats:
    table = np.zeros((len(costs.stages), 4))
    table[:, Kind.F] = [stage.forward_s for stage in costs.stages]
    table[:, Kind.B] = [stage.backward_s for stage in costs.stages]
    table[:, Kind.I] = [stage.input_grad_s or 0.0 for stage in costs.stages]
    table[:, Kind.W] = [stage.weight_grad_s or 0.0 for stage in costs.stages]
    return table.ravel()


def _links(home: Indices, ranks: int) -> tuple[Indices, int]:
    """Numbers of the directed links [2, S], upwards and downwards, and how many there are."""
    link = np.full((2, len(home)), -1, dtype=np.int64)
    apart = home[:-1] != home[1:]
    link[0, :-1] = np.where(apart, home[:-1] * ranks + home[1:], -1)
    link[1, 1:] = np.where(apart, home[1:] * ranks + home[:-1], -1)
    used = np.unique(link[link >= 0])
    link[link >= 0] = np.searchsorted(used, link[link >= 0])
    return link, len(used)


def _limits(home: Indices, footprint: Footprint, microbatches: int) -> Floats:
    """[P] the limit, or what a rank holds at the most, if that is less (so it is finite)."""
    rise = footprint.rise.reshape(-1, 4)
    most = np.bincount(home, weights=rise[:, Kind.F] + np.maximum(0.0, rise[:, 1:3].max(axis=1)))
    return np.asarray(np.minimum(footprint.limit, most * microbatches * (1 + ROUNDING)))


def _reserves(home: Indices, footprint: Footprint) -> Floats:
    """[S] what later stages of the rank need for one microbatch, and the rise of a backward."""
    rise = footprint.rise.reshape(-1, 4)
    reserve = np.zeros(len(home))
    for s in range(len(home)):
        same = np.flatnonzero(home == home[s])
        reserve[s] = rise[same[same > s], Kind.F].sum() + max(0.0, rise[same, 1:3].max())
    return reserve
