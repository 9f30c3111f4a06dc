"""Tries the list scheduler with many settings, and keeps the best programs.

A setting is a vector of a few numbers: how the ideal flow is stretched, how long W waits, and the
list scheduler's own rules. Settings are drawn at random first, then around the best ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.construct import construct
from fullbore.search.evaluate import evaluate, objective
from fullbore.search.instance import Instance, Work
from fullbore.search.jit import kernel
from fullbore.search.tokens import Tokens

__all__ = ["Flow", "draw", "explore", "flow_of", "mutate"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.int32]

# Of a setting, by column: lowest and highest value that is drawn.
_RANGES = np.array(
    [
        (0.0, 1.5),  # stretch of the way up
        (0.0, 1.5),  # stretch of the way down
        (-2.0, 1.0),  # shift of backwards against forwards, periods x P
        (-0.5, 3.0),  # delay of W against its backward before that, periods x P
        (-2.0, 2.0),  # how much longer that is on the last rank than on the first, periods x P
        (0.0, 1.2),  # pace of W, periods
        (-1.0, 1.0),  # preference for later stages of a rank, periods
        (0.0, 1.0),  # rules of the list scheduler
        (0.0, 1.0),
        (0.3, 1.0),
        (0.0, 1.0),
        (0.0, 1.0),
    ]
)
_TILT, _LATER, _RULES, _SPLIT = 4, 6, 7, 10


class Flow:
    """One microbatch's way through an idle pipeline, and the steady period."""

    __slots__ = ("chain_s", "chunk", "period_s")

    def __init__(self, chain_s: Floats, chunk: Floats, period_s: float) -> None:
        self.chain_s, self.chunk, self.period_s = chain_s, chunk, period_s


def flow_of(instance: Instance) -> Flow:
    """chain_s [2, S]: earliest start of F and of the backward; chunk [S]: which of its rank's."""
    stages = instance.stages
    hop_s = np.zeros((2, stages))
    hop_s[0, 1:] = instance.link[0, :-1] >= 0
    hop_s[1, :-1] = instance.link[1, 1:] >= 0
    hop_s *= instance.hop_s + instance.occupancy_s
    table = instance.duration_s.reshape(stages, 4)
    up_s = table[:, 0] + instance.lead_s
    down_s = (table[:, 2] if instance.splits else table[:, 1]) + instance.lead_s
    start_up = np.cumsum(hop_s[0]) + np.cumsum(up_s) - up_s
    back = np.cumsum(hop_s[1][::-1]) + np.cumsum(down_s[::-1]) - down_s[::-1]
    start_down = start_up[-1] + up_s[-1] + back[::-1]
    whole_s = table[:, 2] + table[:, 3] + instance.lead_s if instance.splits else table[:, 1]
    busy_s = np.bincount(instance.home, weights=up_s + whole_s + instance.lead_s)
    chunk = np.zeros(stages)
    for rank in range(instance.ranks):
        own = instance.own[instance.first[rank] : instance.first[rank + 1]]
        chunk[own] = np.arange(len(own))
    return Flow(np.stack([start_up, start_down]), chunk, float(busy_s.max()))


def draw(random: np.random.Generator, settings: int) -> Floats:
    """Settings [n, D] drawn at random, some of their numbers at the ends of the range."""
    low, high = _RANGES.T
    drawn = random.uniform(low, high, size=(settings, len(_RANGES)))
    at_end = random.random(drawn.shape)
    drawn = np.where(at_end < 0.15, low, np.where(at_end > 0.85, high, drawn))
    drawn[:, 0:2] = np.where(random.random((settings, 1)) < 0.4, 1.0, drawn[:, 0:2])
    drawn[:, [_TILT, _LATER]] *= random.random((settings, 2)) < 0.5
    drawn[:, _TILT + 1] = np.where(random.random(settings) < 0.5, 1.0, drawn[:, _TILT + 1])
    drawn[:, _SPLIT:] **= 2
    drawn[:, _SPLIT] = np.where(random.random(settings) < 0.5, 1.0, drawn[:, _SPLIT])
    return np.ascontiguousarray(drawn)


def mutate(random: np.random.Generator, best: Floats, settings: int) -> Floats:
    """Settings [n, D] near one of the best [b, D]: a few numbers moved, by a little mostly."""
    low, high = _RANGES.T
    made = best[random.integers(len(best), size=settings)].copy()
    chosen = random.random(made.shape) < 0.35
    size = (high - low) * np.exp(random.uniform(np.log(0.01), np.log(0.5), size=(settings, 1)))
    made += chosen * size * random.standard_normal(made.shape)
    return np.ascontiguousarray(np.clip(made, low, high))


def explore(
    instance: Instance, flow: Flow, settings: Floats, work: Work, *, spans: bool, best: Tokens
) -> Floats:
    """The objective [n] of what each setting constructs; the best programs go to `best`."""
    values = np.full(len(settings), np.inf)
    _explore(
        instance,
        flow.chain_s,
        flow.chunk,
        flow.period_s,
        settings,
        spans,
        work,
        np.zeros_like(best.program),
        np.zeros_like(best.count),
        best.program,
        best.count,
        values,
    )
    return values


@kernel
def _explore(
    instance: Instance,
    chain_s: Floats,
    chunk: Floats,
    period_s: float,
    settings: Floats,
    spans: bool,  # noqa: FBT001
    work: Work,
    program: TokenArray,  # scratch
    count: Indices,  # scratch
    best_program: TokenArray,
    best_count: Indices,
    values: Floats,
) -> None:
    best, nothing = np.inf, np.zeros(instance.ranks, dtype=np.int64)
    for number in range(len(settings)):
        complete = lay_out(
            instance,
            chain_s,
            chunk,
            period_s,
            settings[number],
            program,
            count,
            program,
            nothing,
            work,
        )
        if complete and evaluate(instance, program, count, work):
            values[number] = objective(work, spans)
            if values[number] < best:
                best = values[number]
                best_program[:] = program
                best_count[:] = count


@kernel
def lay_out(
    instance: Instance,
    chain_s: Floats,
    chunk: Floats,
    period_s: float,
    setting: Floats,
    program: TokenArray,  # out
    count: Indices,  # out
    given: TokenArray,
    given_count: Indices,
    work: Work,
) -> bool:
    """The list scheduler with one setting, after programs that begin as given (see `construct`)."""
    keys, paces_s = np.zeros((3, instance.stages)), np.zeros(2)
    far_s, most = instance.ranks * period_s, max(1, instance.ranks - 1)
    paces_s[0], paces_s[1] = period_s, setting[5] * period_s
    for stage in range(instance.stages):
        later = setting[_LATER] * chunk[stage] * period_s
        keys[0, stage] = setting[0] * chain_s[0, stage] - later
        keys[1, stage] = setting[1] * chain_s[1, stage] + later
        tilt = setting[_TILT] * instance.home[stage] / most
        keys[2, stage] = keys[1, stage] + (setting[3] + tilt) * far_s
        keys[1, stage] += setting[2] * far_s
    rules = setting[_RULES:]
    return bool(construct(instance, keys, paces_s, rules, program, count, given, given_count, work))
