"""Split backward: every B becomes an I, and a W some actions later.

    rank 1  1F0 1B0 1F1 1B1     ->    rank 1  1F0 1I0 1F1 1W0 1I1 1W1        (delay 1)

I is what the rank before waits for, so it keeps B's place; W is needed by nobody but the optimizer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fullbore.errors import ScheduleError
from fullbore.ir import Kind, Program, Schedule
from fullbore.passes.communication import strip_communication

__all__ = ["split_backward"]


def split_backward(schedule: Schedule, *, delay: int = 0) -> Schedule:
    """The same schedule with I and W in place of every B; compute actions only. Linear in actions.

    delay: how many further actions of its rank each W lets pass, at most until the program ends.
    """
    if delay < 0:
        raise ScheduleError(f"delay is {delay}: the nearest legal value is 0")
    programs = strip_communication(schedule).programs
    return replace(schedule, programs=tuple(_split(program, delay) for program in programs))


def _split(program: Program, delay: int) -> Program:
    whole = np.flatnonzero(program.kind == Kind.B)
    source = np.concatenate([np.arange(len(program)), whole])
    # where each stands: own actions at their index, a W behind the action that it lets pass last
    place = np.concatenate([np.arange(len(program)), np.minimum(whole + delay, len(program) - 1)])
    is_weight = np.arange(len(source)) >= len(program)
    order = np.lexsort((source, is_weight, place))
    kind = np.where(program.kind == Kind.B, np.int8(Kind.I), program.kind)[source]
    kind[is_weight] = Kind.W
    return Program(
        kind=kind[order],
        stage=program.stage[source][order],
        microbatch=program.microbatch[source][order],
    )
