"""A list scheduler: rank by rank as it comes free, the ready action with the smallest key.

Keys say when an action would run in an ideal steady flow: microbatch m of a stage m periods after
microbatch 0. Weight gradients fill time in which nothing else is ready. A rank may also wait a
little for something more urgent that is already on its way.

No memory limit makes it deadlock. A forward of a stage is let in only while what later stages of
its rank need for one microbatch stays free (`Instance.reserve`). Suppose every rank were stuck.
No W is pending then, for those always run. Take the last stage with a forward that has its input
but no room. Everything beyond it has come back, since nothing beyond it is stuck; so its rank holds
activations of earlier stages only, and when the latest of those was let in, room for this one
was kept free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.instance import Instance, Work
from fullbore.search.jit import kernel

__all__ = ["RULES", "construct"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

RULES = 5
"""Numbers that steer the list scheduler, beside the keys: see `construct`."""

_NOTHING = -1


@kernel
def _choose(
    instance: Instance,
    work: Work,
    rank: int,
    need: Floats,  # [2, S] memory that must be there for a forward, and for a backward
    room: Floats,  # [2] memory that is there for them
    keys: Floats,
    paces_s: Floats,
    patience_s: Floats,  # [4 * S] how much later than now something may be there to be waited for
    now: float,
) -> tuple[int, float]:
    """The token that a rank which is free starts now; or none, and when it should look again."""
    done, split, ready_s = work.done, work.split, work.ready_s
    last, microbatches = instance.stages - 1, instance.microbatches
    chosen, chosen_key, coming_s, coming_key = _NOTHING, np.inf, np.inf, np.inf
    weight, weight_key = _NOTHING, np.inf
    for at in range(instance.first[rank], instance.first[rank + 1]):
        stage = instance.own[at]
        if split[stage] > done[2, stage]:
            key = done[2, stage] * paces_s[1] + keys[2, stage]
            if key < weight_key:
                weight, weight_key = stage * 4 + 3, key
        for way in range(2):
            microbatch = done[way, stage]
            if microbatch >= (microbatches if way == 0 else done[0, stage]):
                continue
            there_s = 0.0
            if stage != way * last:
                if done[way, stage - 1 + 2 * way] <= microbatch:
                    continue
                there_s = ready_s[way, stage, microbatch]
            if need[way, stage] > room[way]:
                continue
            key = microbatch * paces_s[0] + keys[way, stage]
            if there_s > now:
                if there_s < coming_s:
                    coming_s, coming_key = there_s, key
            elif key < chosen_key:
                chosen, chosen_key = stage * 4 + 2 * way, key
    if weight >= 0 and (weight_key < chosen_key or chosen < 0):
        chosen, chosen_key = weight, weight_key if chosen >= 0 else np.inf
    if coming_key < chosen_key and coming_s - now < patience_s[chosen]:
        chosen = _NOTHING
    return chosen, coming_s


@kernel
def construct(
    instance: Instance,
    keys: Floats,  # [3, S] seconds: of F, of a backward, of W, for microbatch 0
    paces_s: Floats,  # [2] how much later those of the next microbatch are: of F and backward; of W
    rules: Floats,  # [RULES]
    program: Tokens,  # out [P, L]
    count: Indices,  # out [P]
    given: Tokens,  # [P, L]: how the programs begin ...
    given_count: Indices,  # [P] ... for so many tokens
    work: Work,
) -> bool:
    """Write programs that are legal and end; False where even one microbatch does not fit.

    rules: 0, the share of a W, and 1, of an F or backward, that must pass before something more
    urgent is there for it to be started at all; 2, the share of the limit that forwards may fill;
    3, the share of microbatches, from the first one on, whose backward is split, and 4, from the
    last one back.
    """
    done, split, last = work.done, work.split, instance.stages - 1
    done[:], split[:], work.link_free_s[:], count[:] = 0, 0, 0.0, 0
    live, room, limits = np.zeros(instance.ranks), np.zeros(2), instance.limit
    need, patience_s = _needs(instance), _patience(instance, rules)
    free_s = np.zeros(instance.ranks)  # when each rank's last action ends
    again_s = np.zeros(instance.ranks)  # when it decides next
    whole_from = rules[3] * instance.microbatches if instance.splits else 0.0
    whole_until = (1.0 - rules[4]) * instance.microbatches if instance.splits else np.inf
    while True:
        rank = int(np.argmin(again_s))
        now = again_s[rank]
        if now == np.inf:
            break
        token = _NOTHING
        if count[rank] < given_count[rank]:
            token = given[rank, count[rank]]
            later_s = _awaited(token, done, work.ready_s)
            if later_s > now:
                again_s[rank] = later_s
                continue
        else:
            limit = limits[rank]
            room[0] = (
                max(limit * rules[2], need[0, instance.own[instance.first[rank]]]) - live[rank]
            )
            room[1] = limit - live[rank]
            token, later_s = _choose(
                instance, work, rank, need, room, keys, paces_s, patience_s, now
            )
            if token == _NOTHING:
                again_s[rank] = later_s
                continue
            if token & 3 == 2 and whole_from <= done[1, token >> 2] < whole_until:
                token -= 1
        if live[rank] + instance.rise[token] > limits[rank]:
            return False
        program[rank, count[rank]] = token
        count[rank] += 1
        live[rank] += instance.change[token]
        free_s[rank] = now + instance.lead_s + instance.duration_s[token]
        again_s[rank] = free_s[rank]
        stage = token >> 2
        if token & 3 == 3:
            done[2, stage] += 1
            continue
        way = 0 if token & 3 == 0 else 1
        split[stage] += token & 3 == 2
        done[way, stage] += 1
        if stage != (1 - way) * last:
            _pass_on(instance, work, stage, way, free_s, again_s)
    return bool(np.all(done[1] == instance.microbatches) and np.all(done[2] == split))


@kernel
def _pass_on(
    instance: Instance, work: Work, stage: int, way: int, free_s: Floats, again_s: Floats
) -> None:
    """Send what a forward or backward has made, which ends when its rank is free, to the next."""
    target, usable_s = stage + 1 - 2 * way, free_s[instance.home[stage]]
    channel = instance.link[way, stage]
    if channel >= 0:
        sent_s = max(usable_s, work.link_free_s[channel]) + instance.occupancy_s
        work.link_free_s[channel] = sent_s
        usable_s = sent_s + instance.hop_s
    work.ready_s[way, target, work.done[way, stage] - 1] = usable_s
    other = instance.home[target]
    again_s[other] = min(again_s[other], max(usable_s, free_s[other]))


@kernel
def _awaited(token: int, done: Indices, ready_s: Floats) -> float:
    """When the input of a token that must come next is there: inf where it is not made yet."""
    stage, way = token >> 2, 0 if token & 3 == 0 else 1
    if token & 3 == 3 or stage == way * (ready_s.shape[1] - 1):
        return 0.0
    if done[way, stage - 1 + 2 * way] <= done[way, stage]:
        return np.inf
    return float(ready_s[way, stage, done[way, stage]])


@kernel
def _needs(instance: Instance) -> Floats:
    """Memory [2, S] that must be free for a forward, its reserve included, and for a backward."""
    need = np.zeros((2, instance.stages))
    for stage in range(instance.stages):
        need[0, stage] = instance.rise[stage * 4] + instance.reserve[stage]
        need[1, stage] = instance.rise[stage * 4 + 2 if instance.splits else stage * 4 + 1]
    return need


@kernel
def _patience(instance: Instance, rules: Floats) -> Floats:
    """Seconds [4 * S] within which something more urgent must be there to be waited for."""
    patience_s = np.zeros(len(instance.duration_s))
    for token in range(len(patience_s)):
        share = rules[0] if token & 3 == 3 else rules[1]
        patience_s[token] = share * (instance.duration_s[token] + instance.lead_s)
    return patience_s
