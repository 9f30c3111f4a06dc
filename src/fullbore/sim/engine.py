"""What a schedule would take: a Timeline from programs and costs.

Each rank runs its program in order. A compute action starts when its rank is free, its input is
there and `overhead_s` has passed; a message enters its link when it is made and the link is free,
keeps the link for message_bytes / bandwidth, and arrives `hop_s` later. With overlap, sending
costs the rank nothing; without, the rank stands still until its message has arrived.
Compute-only schedules have their messages implied, and compute takes place at the same times as
with sends and receives written out; so do these, but for a message that is taken before its turn
because another one follows it on its link.

OFFLOAD and RELOAD occupy the one copy channel between their rank and its host, in the order in
which the rank comes to them; the rank goes on at once. A backward waits for its RELOAD to be over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from fullbore.cost import Costs
from fullbore.errors import CostsError, VerificationError
from fullbore.ir import COPY_KINDS, Dependencies, FlatSchedule, Kind, Schedule, dependencies
from fullbore.sim.kernel import run_programs
from fullbore.sim.spans import Problem, Times, lay_out
from fullbore.timeline import Timeline

__all__ = ["compiled", "problem_of", "refuse_deadlock", "run", "simulate"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

# Plain Python takes some 2.5 us an action; importing numba and loading the compiled kernel from
# its cache takes half a second, compiling it another one and a half.
COMPILE_FROM_ACTIONS = 20_000

# Makespans beyond these are mistaken units, and no number of figures or pictures would be exact.
SHORTEST_S, LONGEST_S = 1e-12, 1e9


def simulate(schedule: Schedule, costs: Costs, *, overlap: bool = True) -> Timeline:
    """Predict when each action of a schedule runs and when each message travels.

    Returns a Timeline with a span for every compute action, copy, SEND and RECV, in the order
    in which each rank comes to them. A copy's span is the time in which it has the channel. A SEND
    span ends when the message has left (without overlap: when it has arrived); a RECV span is the
    wait for a message, of no length if it was there.
    Raises CostsError where `costs` do not fit the schedule or the step would last less than a
    picosecond (but for 0) or more than 30 years, VerificationError where it cannot run.
    """
    problem = problem_of(schedule, costs)
    times = run(schedule, problem, costs, blocking=not overlap)
    _refuse_odd_units(float(times.end_s.max(initial=0.0)))
    return lay_out(schedule, problem, times, overlap=overlap)


def problem_of(schedule: Schedule, costs: Costs) -> Problem:
    """A schedule and its costs as the kernel wants them; raises as `simulate` does."""
    flat, deps = schedule.flat(), dependencies(schedule)
    duration_s = _durations(schedule, flat, costs)
    _refuse_gaps(flat, deps, schedule.stages)
    remote = np.flatnonzero(deps.value >= 0)
    remote = remote[flat.rank[remote] != flat.rank[deps.value[remote]]]
    reader = np.full(len(flat.kind), -1, dtype=np.int64)
    reader[deps.value[remote]] = flat.rank[remote]
    pair = flat.rank * np.int64(schedule.ranks) + reader
    used = np.zeros(schedule.ranks**2, dtype=np.bool_)
    used[pair[reader >= 0]] = True
    number = np.cumsum(used) - 1
    links, copies = int(used.sum()), np.isin(flat.kind, COPY_KINDS)
    link = np.where(reader >= 0, number[pair], -1)
    link[copies] = links + flat.rank[copies]
    return Problem(
        flat=flat,
        provider=deps.value,
        reload=_reloads(flat, deps),
        reader=reader,
        link=link,
        links=links + schedule.ranks,
        occupancy_s=_occupancies(schedule, flat, copies, costs),
        duration_s=duration_s,
        lead_s=np.where(flat.kind < Kind.OFFLOAD, costs.overhead_s, 0.0),
    )


def _reloads(flat: FlatSchedule, deps: Dependencies) -> Indices:
    """The RELOAD [N] that an action waits for, or -1."""
    has = (deps.stored >= 0) & (flat.kind[deps.stored] == Kind.RELOAD)
    return np.where(has, deps.stored, -1)


def _occupancies(
    schedule: Schedule, flat: FlatSchedule, copies: npt.NDArray[np.bool_], costs: Costs
) -> Floats:
    """How long each action [N] keeps its link or copy channel busy, of a slice its share."""
    occupancy_s = np.full(len(flat.kind), costs.occupancy_s)
    if copies.any():
        table = [
            [seconds(stage) for stage in range(len(costs.stages))]
            for seconds in (costs.offload_s, costs.reload_s)
        ]
        asked = np.array([[np.nan if s is None else s for s in row] for row in table])
        occupancy_s[copies] = asked[flat.kind[copies] - Kind.OFFLOAD, flat.stage[copies]]
        unknown = np.flatnonzero(np.isnan(occupancy_s))
        if len(unknown):
            raise CostsError(
                f"the schedule has {flat.action(int(unknown[0]))}, and nothing says how long that "
                "takes: give offload_s a stage, or activation_bytes and offload_bytes_per_s"
            )
    return occupancy_s / schedule.slices


def _refuse_gaps(flat: FlatSchedule, deps: Dependencies, stages: int) -> None:
    """Stop at an action whose input nobody makes, or that stands before what it needs."""
    kind, stage = flat.kind, flat.stage
    backward = (kind == Kind.B) | (kind == Kind.I)
    needs_value = (kind >= Kind.SEND_F) | ((kind == Kind.F) & (stage > 0))
    needs_value |= backward & (stage < stages - 1)
    needs_stored = (kind > Kind.F) & (kind < Kind.SEND_F)
    position = np.arange(len(kind))
    late = (needs_stored & (deps.stored >= position)) | (deps.carried >= position)
    wrong = (needs_value & (deps.value < 0)) | (needs_stored & (deps.stored < 0)) | late
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise VerificationError(
            f"rank {flat.rank[index]} cannot run {flat.action(index)}: what it needs is "
            f"{'done only after it' if late[index] else 'never made'}; verify the schedule for "
            "the full list of what is wrong"
        )


def _durations(schedule: Schedule, flat: FlatSchedule, costs: Costs) -> Floats:
    """Seconds of each action [N], of a slice its share; communication takes the rank no time of
    its own.
    """
    if len(costs.stages) != schedule.stages:
        raise CostsError(
            f"the costs describe {len(costs.stages)} stages, the schedule has {schedule.stages}: "
            "give one entry a stage"
        )
    whole = np.array([not stage.is_split for stage in costs.stages])
    halved = whole[flat.stage] & (flat.kind == Kind.I)
    if halved.any():
        raise CostsError(
            f"{schedule.name} splits the backward of stage {flat.stage[halved][0]}: give its "
            "input_grad_s and weight_grad_s"
        )
    table = np.zeros((len(Kind), schedule.stages))
    table[Kind.F] = [stage.forward_s for stage in costs.stages]
    table[Kind.B] = [stage.backward_s for stage in costs.stages]
    table[Kind.I] = [stage.input_grad_s or 0.0 for stage in costs.stages]
    table[Kind.W] = [stage.weight_grad_s or 0.0 for stage in costs.stages]
    table[Kind.R] = [stage.recomputation_s for stage in costs.stages]
    return np.asarray(table[flat.kind, flat.stage]) / schedule.slices


def run(
    schedule: Schedule, problem: Problem, costs: Costs, *, blocking: bool, times: int = 1
) -> Times:
    """Run the kernel, compiled where that pays in so many `times`, and refuse a deadlock."""
    actions, ranks = len(problem.provider), schedule.ranks
    arrays = {
        "offsets": problem.flat.offsets,
        "provider": problem.provider,
        "reload": problem.reload,
        "reader": problem.reader,
        "link": problem.link,
        "occupancy_s": problem.occupancy_s,
        "duration_s": problem.duration_s,
        "lead_s": problem.lead_s,
        "reached_s": np.zeros(actions),
        "start_s": np.zeros(actions),
        "end_s": np.zeros(actions),
        "left_s": np.zeros(actions),
        "usable_s": np.full(actions, -1.0),
        "position": np.zeros(ranks, dtype=np.int64),
        "awaited": np.full(ranks, -1, dtype=np.int64),
        "clock_s": np.zeros(ranks),
        "link_free_s": np.zeros(problem.links),
        "runnable": np.zeros(ranks, dtype=np.int64),
    }
    if actions * times >= COMPILE_FROM_ACTIONS:
        compiled()(**arrays, hop_s=costs.hop_s, blocking=blocking)
    else:
        lists = {name: array.tolist() for name, array in arrays.items()}
        run_programs(**lists, hop_s=costs.hop_s, blocking=blocking)
        arrays = {name: np.array(lists[name]) for name in ("position", *Times.__slots__)}
    refuse_deadlock(problem.flat, arrays["position"])
    return Times(**{name: arrays[name] for name in Times.__slots__})


@cache
def compiled() -> Callable[..., None]:
    """The kernel as machine code, kept on disk between runs where numba finds a folder for it."""
    import numba

    compiled: Callable[..., None]
    try:
        compiled = numba.njit(cache=True)(run_programs)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written to
        compiled = numba.njit(run_programs)
    return compiled


def _refuse_odd_units(end_s: float) -> None:
    if end_s != 0.0 and not SHORTEST_S <= end_s <= LONGEST_S:
        raise CostsError(
            f"the step would last {end_s:.4g} s, which is not between {SHORTEST_S:g} s and "
            f"{LONGEST_S:g} s: give all costs in seconds"
        )


def refuse_deadlock(flat: FlatSchedule, position: Indices) -> None:
    """Raise VerificationError where a rank stopped at its `position` [P], before its end."""
    stuck = np.flatnonzero(position < flat.offsets[1:])
    if len(stuck):
        where = ", ".join(f"rank {r} at {flat.action(int(position[r]))}" for r in stuck[:8])
        raise VerificationError(
            f"the schedule deadlocks: {where}{' ...' if len(stuck) > 8 else ''}; each of these "
            "waits for another: put the actions that they wait for earlier"
        )
