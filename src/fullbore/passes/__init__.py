"""Passes: pure functions from schedule to schedule, in one visible list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fullbore.ir import Schedule
from fullbore.passes.communication import insert_communication, strip_communication
from fullbore.passes.forward_only import forward_only
from fullbore.passes.offload import offload
from fullbore.passes.recompute import recompute_ahead
from fullbore.passes.split import split_backward

__all__ = [
    "PASSES",
    "Pass",
    "forward_only",
    "insert_communication",
    "offload",
    "recompute_ahead",
    "split_backward",
    "strip_communication",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A rewriting of schedules: its name, what it does, and the function that does it."""

    name: str
    summary: str
    apply: Callable[[Schedule], Schedule]


# In the order in which a schedule that a generator made may go through them on its way to a
# runtime; each leaves alone what has nothing for it to do.
PASSES: tuple[Pass, ...] = (
    Pass(
        name="strip-communication",
        summary="leave compute actions only",
        apply=strip_communication,
    ),
    Pass(
        name="split-backward",
        summary="split every backward into its input-gradient and weight-gradient halves",
        apply=split_backward,
    ),
    Pass(
        name="recompute-ahead",
        summary="make the activations of every forward again before its backward needs them",
        apply=recompute_ahead,
    ),
    Pass(
        name="offload",
        summary="send activations that live long to the host, and take them back in time",
        apply=offload,
    ),
    Pass(
        name="insert-communication",
        summary="write out each message between ranks as a send and a receive",
        apply=insert_communication,
    ),
)
