"""Where the seconds of a step go, by simulating it with one thing after another taken away.

    T      as it is                          communication = T - T0
    T0     messages between stages take no time   imbalance = T0 - T1
    T1     and all stages cost the same          bubble = T1 - compute

What is left, T1, has only the idle time that the schedule's order asks for: before a rank's first
backward (warm-up), after its last forward (cool-down), and between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fullbore.cost import Costs, StageCosts
from fullbore.plan.choice import Choice
from fullbore.plan.evaluate import Evaluator
from fullbore.plan.load import Load
from fullbore.plan.prices import Floats, Row
from fullbore.sim import simulate
from fullbore.timeline import summarize

__all__ = ["Idle", "Parts", "idle_of", "parts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds that add up to a step.

    compute_s: of the average rank, without the next three. recompute_s: what is made again, with
    its messages and its waits for the host. Of the rest exposed_s: messages within stages (tensor,
    context, expert parallel) that nothing hides; host_s: by how much the host is behind where it
    starts kernels more slowly than they run.
    bubble_s, imbalance_s, communication_s: see above; imbalance may be below 0 where unequal stages
    suit the order. reduction_s, optimizer_s, lost_s: as in `Step`.
    """

    compute_s: float
    recompute_s: float
    exposed_s: float
    host_s: float
    bubble_s: float
    imbalance_s: float
    communication_s: float
    reduction_s: float
    optimizer_s: float
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Idle:
    """Idle seconds of each rank [P]; they add up to the pipeline's time less `busy_s`."""

    busy_s: Floats
    warmup_s: Floats
    steady_s: Floats
    cooldown_s: Floats
    imbalance_s: Floats
    communication_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """T, T0 and T1, and what an average rank computes."""

    as_it_is_s: float
    no_messages_s: float
    balanced_s: float
    average_s: float


def parts_of(evaluator: Evaluator, choice: Choice) -> Parts:
    """The parts of a choice's step; three simulations."""
    load, step = evaluator.load(choice), evaluator.step(choice)
    times = _times(evaluator, choice)
    share = choice.spread.microbatches / load.ranks
    again_s = float(load.sums[Row.RECOMPUTE_S].sum()) * share
    exposed_s = float(load.sums[Row.EXPOSED_S].sum()) * share
    host_s = float(load.sums[Row.HOST_S].sum()) * share
    return Parts(
        compute_s=times.average_s - again_s - exposed_s - host_s,
        recompute_s=again_s,
        exposed_s=exposed_s,
        host_s=host_s,
        bubble_s=times.balanced_s - times.average_s,
        imbalance_s=times.no_messages_s - times.balanced_s,
        communication_s=times.as_it_is_s - times.no_messages_s,
        reduction_s=step.reduction_s,
        optimizer_s=step.optimizer_s,
        lost_s=step.lost_s,
    )


def idle_of(evaluator: Evaluator, choice: Choice) -> Idle:
    """The idle time of every rank under a choice, by its cause."""
    load, times = evaluator.load(choice), _times(evaluator, choice)
    schedule = evaluator.programs.of(choice).schedule
    seconds = _balanced(load)
    stage = StageCosts(
        forward_s=float(seconds[0, 0]),
        backward_s=float(seconds[1, 0]),
        input_grad_s=float(seconds[2, 0]),
        weight_grad_s=float(seconds[3, 0]),
    )
    costs = Costs(stages=(stage,) * schedule.stages)
    summary = summarize(simulate(schedule, costs), schedule)
    idle = times.no_messages_s - load.busy_s
    ideal = np.array(summary.idle_s)
    return Idle(
        busy_s=load.busy_s,
        warmup_s=np.array(summary.warmup_idle_s),
        steady_s=np.array(summary.steady_idle_s),
        cooldown_s=np.array(summary.cooldown_idle_s),
        imbalance_s=idle - ideal,
        communication_s=np.full(load.ranks, times.as_it_is_s - times.no_messages_s),
    )


def _times(evaluator: Evaluator, choice: Choice) -> _Times:
    load, rehearsal = evaluator.load(choice), evaluator.programs.of(choice).rehearsal
    real = evaluator.step(choice).pipeline_s
    still = rehearsal.ends_s(load.sums.seconds, hop_s=0.0, occupancy_s=0.0)
    even = rehearsal.ends_s(_balanced(load), hop_s=0.0, occupancy_s=0.0)
    return _Times(
        as_it_is_s=real,
        no_messages_s=float(still.max()),
        balanced_s=float(even.max()),
        average_s=float(load.busy_s.mean()),
    )


def _balanced(load: Load) -> Floats:
    """Every stage the mean of all [4, S]."""
    seconds = load.sums.seconds
    return np.repeat(seconds.mean(axis=1, keepdims=True), seconds.shape[1], axis=1)
