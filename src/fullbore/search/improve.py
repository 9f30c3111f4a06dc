"""Local search on programs: small changes where they matter, kept when they help, or nearly.

A change matters only if it touches the chain of actions that decides the objective. So a move
takes an action of that chain and puts it before or behind others of its rank's program, or joins
or splits a backward. Worse programs are accepted with a probability that falls with how much
worse they are (simulated annealing); the best ones seen are kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.search.evaluate import copy_changes, evaluate, is_legal, objective, resume
from fullbore.search.instance import Instance, Work
from fullbore.search.jit import kernel
from fullbore.search.moves import can_shift, clip, fill_tails, promise

__all__ = ["anneal", "begin", "look", "propose", "put", "seed_kernels", "take_back"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]

_BLIND = 8  # moves that change nothing, until chain and tails are looked up again
_ROUNDING = 1e-12
_TAIL = 0.02  # how much the mean of all ranks counts beside the objective


@kernel
def seed_kernels(seed: int) -> None:
    """Set the random numbers of all kernels of this thread."""
    np.random.seed(seed)


@kernel
def anneal(
    instance: Instance,
    program: Tokens,  # in and out [P, L]: the programs that the walk stands at
    count: Indices,  # in and out [P]
    spans: bool,  # noqa: FBT001 (numba has no keyword-only)
    temperature_s: float,
    moves: int,
    enough_s: float,
    best_program: Tokens,  # in and out: the best ones seen
    best_count: Indices,
    best_s: float,
    work: Work,  # scratch: what is known of `program`
    trial: Work,  # scratch
) -> float:
    """Try so many moves; the objective of the best programs (best_s if none were better)."""
    path = np.zeros((instance.ranks * program.shape[1], 2), dtype=np.int64)
    ends_s = np.zeros(program.shape[1])
    least_s = begin(instance, program, count, work, trial)
    energy_s, value_s = _energy(work, spans), objective(work, spans)
    steps = look(instance, program, count, spans, work, path)
    move = np.zeros(4, dtype=np.int64)
    unseen = 0
    for _ in range(moves):
        propose(instance, program, count, path, steps, move)
        rank, here, there, change = move[0], move[1], move[2], move[3]
        worse_s = -temperature_s * np.log(1.0 - np.random.random())
        if change == 0:
            there = clip(program, rank, here, there)
            if here == there or not can_shift(instance, program, work, rank, here, there):
                continue
            promised_s = promise(instance, program, count, work, rank, here, there, ends_s)
            if promised_s > value_s + worse_s + _ROUNDING * value_s:
                continue
        move[2] = there
        allowed_s = energy_s + worse_s
        if not _try(instance, program, count, work, trial, move, spans, allowed_s, least_s):
            continue
        unseen += 1
        now_s = objective(work, spans)
        if now_s != value_s or unseen == _BLIND:
            steps = look(instance, program, count, spans, work, path)
            unseen = 0
        energy_s, value_s = _energy(work, spans), now_s
        if value_s < best_s:
            best_s = value_s
            best_program[:] = program
            best_count[:] = count
            if best_s <= enough_s:
                break
    return best_s


@kernel
def look(
    instance: Instance,
    program: Tokens,
    count: Indices,
    spans: bool,  # noqa: FBT001
    work: Work,
    path: Indices,
) -> int:
    """Find the chain that decides the objective, and all tails anew; how many the chain has."""
    fill_tails(instance, program, count, work, spans)
    return _critical(instance, program, count, spans, work, path)


@kernel
def _try(
    instance: Instance,
    program: Tokens,
    count: Indices,
    work: Work,
    trial: Work,
    move: Indices,
    spans: bool,  # noqa: FBT001
    allowed_s: float,
    least_s: float,
) -> bool:
    """Make a move, and take it back unless its energy is allowed."""
    rank, here, there, change = move[0], move[1], move[2], move[3]
    most_s = allowed_s - _TAIL * least_s
    busy_s = trial.busy_s[rank]
    put(program, count, move)
    if change == 0 or is_legal(instance, program, count, trial, rank):
        begin = min(here, there)
        runs = resume(instance, program, count, trial, rank, begin, most_s, spans)
        if runs and _energy(trial, spans) <= allowed_s:
            copy_changes(instance, trial, work)
            is_legal(instance, program, count, work, rank)
            return True
        _forget(instance, work, trial)
    trial.busy_s[rank] = busy_s
    take_back(program, count, move)
    return False


@kernel
def begin(instance: Instance, program: Tokens, count: Indices, work: Work, trial: Work) -> float:
    """Evaluate for both, and the least that the mean of all ranks' times can be."""
    least_s = 0.0
    for rank in range(instance.ranks):
        is_legal(instance, program, count, work, rank)
        is_legal(instance, program, count, trial, rank)
        for at in range(instance.first[rank], instance.first[rank + 1]):
            stage = instance.own[at]
            whole = instance.duration_s[stage * 4 + 1]
            if instance.splits:
                whole = min(whole, instance.duration_s[stage * 4 + 2 : stage * 4 + 4].sum())
            whole += instance.duration_s[stage * 4] + 2 * instance.lead_s
            least_s += instance.microbatches * whole
    evaluate(instance, program, count, work)
    evaluate(instance, program, count, trial)
    return least_s / instance.ranks


@kernel
def _forget(instance: Instance, work: Work, trial: Work) -> None:
    """Put back what an evaluation has changed, whether it came to its end or not."""
    work.from_position[:] = trial.from_position
    work.from_done[:] = trial.from_done
    work.position[:] = trial.position
    work.done[:2] = trial.done[:2]
    copy_changes(instance, work, trial)


@kernel
def _energy(work: Work, spans: bool) -> float:  # noqa: FBT001
    """The objective, and a little of the mean of what all ranks take."""
    total_s = 0.0
    for rank in range(len(work.clock_s)):
        total_s += work.clock_s[rank] - (work.start_s[rank, 0] if spans else 0.0)
    return objective(work, spans) + _TAIL * total_s / len(work.clock_s)


@kernel
def _critical(
    instance: Instance,
    program: Tokens,
    count: Indices,
    spans: bool,  # noqa: FBT001
    work: Work,
    path: Indices,  # out [n, 2] rank and index, from the last one back
) -> int:
    """The chain of tokens that decides the objective, after an evaluation; how many there are."""
    start_s, sent_s, place, number = work.start_s, work.sent_s, work.place, work.number
    link, hop_s = instance.link, instance.hop_s
    duration_s, home, clock_s = instance.duration_s, instance.home, work.clock_s
    rank, worst_s = 0, -1.0
    for r in range(instance.ranks):
        span_s = clock_s[r] - (start_s[r, 0] if spans else 0.0)
        if span_s > worst_s:
            rank, worst_s = r, span_s
    index, steps = count[rank] - 1, 0
    while True:
        path[steps, 0], path[steps, 1] = rank, index
        steps += 1
        token = program[rank, index]
        stage, kind = token >> 2, token & 3
        free_s = -1.0
        if index > 0:
            before = program[rank, index - 1]
            free_s = start_s[rank, index - 1] + duration_s[before]
        way = 0 if kind == 0 else 1
        if kind != 3 and stage != way * (instance.stages - 1):
            microbatch = number[rank, index]
            stage -= 1 - 2 * way
            there_s = sent_s[way, stage, microbatch]
            if link[way, stage] >= 0:
                there_s += hop_s
            if there_s > free_s or (there_s == free_s and np.random.random() < 0.5):
                rank, index = home[stage], place[way, stage, microbatch]
                continue
        index -= 1
        if index < 0:
            return steps


@kernel
def propose(
    instance: Instance, program: Tokens, count: Indices, path: Indices, steps: int, move: Indices
) -> None:
    """Draw a move: move[0] rank, [1] from, [2] to, [3] 1 to join I and W, 2 to split a B."""
    at = np.random.randint(steps)
    rank = path[at, 0]
    length = count[rank]
    here = min(path[at, 1], length - 1)
    move[0], move[1], move[2], move[3] = rank, here, here, 0
    luck = np.random.random()
    if luck < 0.04 and instance.splits:
        _propose_change(program, length, rank, here, move)
        return
    if luck < 0.12:
        rank = np.random.randint(instance.ranks)
        length = count[rank]
        here = np.random.randint(length)
        move[0], move[1] = rank, here
    far = 1
    while far < length and np.random.random() < 0.75:
        far += 1 + far // 8
    token = program[rank, here]
    later = np.random.random() < (0.75 if token & 3 == 3 else 0.35)
    there = here + far if later else here - far
    move[2] = min(max(there, 0), length - 1)


@kernel
def _propose_change(program: Tokens, length: int, rank: int, here: int, move: Indices) -> None:
    """Join the I at, or next before, this place with the next W of its stage; or split a B."""
    for index in range(here, max(-1, here - 8), -1):
        token = program[rank, index]
        if token & 3 == 1:
            move[1], move[2], move[3] = index, index, 2
            return
        if token & 3 == 2:
            for after in range(index + 1, length):
                if program[rank, after] == token + 1:
                    move[1], move[2], move[3] = index, after, 1
                    return
            return


@kernel
def put(program: Tokens, count: Indices, move: Indices) -> None:
    """Make a move (see `propose`)."""
    rank, here, there = move[0], move[1], move[2]
    if move[3] == 0:
        _shift(program, rank, here, there)
    elif move[3] == 1:
        program[rank, here] -= 1
        _shift(program, rank, there, count[rank] - 1)
        count[rank] -= 1
    else:
        program[rank, here] += 1
        program[rank, count[rank]] = program[rank, here] + 1
        count[rank] += 1
        _shift(program, rank, count[rank] - 1, here + 1)


@kernel
def take_back(program: Tokens, count: Indices, move: Indices) -> None:
    """Undo a move that was the last one."""
    rank, here, there = move[0], move[1], move[2]
    if move[3] == 0:
        _shift(program, rank, there, here)
    elif move[3] == 1:
        count[rank] += 1
        _shift(program, rank, count[rank] - 1, there)
        program[rank, here] += 1
    else:
        _shift(program, rank, here + 1, count[rank] - 1)
        count[rank] -= 1
        program[rank, here] -= 1


@kernel
def _shift(program: Tokens, rank: int, here: int, there: int) -> None:
    """Take the token at `here` out and put it at `there`."""
    token = program[rank, here]
    if there > here:
        for index in range(here, there):
            program[rank, index] = program[rank, index + 1]
    else:
        for index in range(here, there, -1):
            program[rank, index] = program[rank, index - 1]
    program[rank, there] = token
