"""The table of schedules: what each is called, costs and demands.

The command line, the documentation and `build` read this one table. Formulas are text for people,
hold for stages that cost the same and no hop latency, and are tested against the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fullbore.errors import ScheduleError
from fullbore.ir import Schedule
from fullbore.schedules.gpipe import gpipe
from fullbore.schedules.interleaved import interleaved
from fullbore.schedules.looped_bfs import looped_bfs
from fullbore.schedules.one_f_one_b import one_f_one_b

__all__ = ["FAMILIES", "Family", "build"]

_DEFAULT_VIRTUAL_STAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of schedule.

    name: as on the command line. summary: one line. bubble: bubble fraction, idle / total.
    bubble_overhead: idle / ideal. memory: peak activations of the worst rank, in microbatches
    x 1/P of the model. constraints: what P, v, M and G must satisfy.
    """

    name: str
    generator: Callable[..., Schedule]
    summary: str
    bubble: str
    bubble_overhead: str
    memory: str
    constraints: str
    takes_virtual_stages: bool = False
    takes_group: bool = False


FAMILIES: tuple[Family, ...] = (
    Family(
        name="gpipe",
        generator=gpipe,
        summary="all forwards, then all backwards",
        bubble="(P-1)/(M+P-1)",
        bubble_overhead="(P-1)/M",
        memory="M",
        constraints="P >= 1, M >= 1",
    ),
    Family(
        name="1f1b",
        generator=one_f_one_b,
        summary="one forward, one backward: GPipe's bubble, P microbatches in memory",
        bubble="(P-1)/(M+P-1)",
        bubble_overhead="(P-1)/M",
        memory="min(P, M); rank r: min(P-r, M)",
        constraints="P >= 1, M >= 1",
    ),
    Family(
        name="interleaved",
        generator=interleaved,
        summary="1F1B over v stages a rank: a v-th of the bubble, v times the messages",
        bubble="(P-1)/(vM+P-1) where G divides M",
        bubble_overhead="(P-1)/(vM) where G divides M",
        memory="min(P(1+(P-1)/(Pv)), M) for G = P; rank r: ((v-1)G+2(P-1-r)+1)/v",
        constraints="P >= 1, v >= 1, any M >= 1, G >= P (default P)",
        takes_virtual_stages=True,
        takes_group=True,
    ),
    Family(
        name="looped-bfs",
        generator=looped_bfs,
        summary="GPipe over v stages a rank, stage by stage: a v-th of the bubble",
        bubble="(P-1)/(vM+P-1) where M >= P",
        bubble_overhead="(P-1)/(vM) where M >= P",
        memory="M",
        constraints="P >= 1, v >= 1, M >= 1",
        takes_virtual_stages=True,
    ),
)


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    microbatch_group_size: int | None = None,
) -> Schedule:
    """Make the schedule of this name, as the command line does.

    virtual_stages: v, by default 2 where the schedule has any. microbatch_group_size: G, by
    default P. Raises ScheduleError for an unknown name, a number that the schedule does not
    take, or one that breaks its rules; the message names the nearest legal values.
    """
    family = _find(name)
    numbers = {"ranks": ranks, "microbatches": microbatches}
    if family.takes_virtual_stages:
        numbers["virtual_stages"] = (
            _DEFAULT_VIRTUAL_STAGES if virtual_stages is None else virtual_stages
        )
    elif virtual_stages not in (None, 1):
        raise ScheduleError(
            f"{name} has one stage a rank, so virtual_stages (v) = {virtual_stages} is not legal: "
            f"leave it at 1, or choose {_names(lambda f: f.takes_virtual_stages)}"
        )
    if microbatch_group_size is not None:
        if not family.takes_group:
            raise ScheduleError(
                f"{name} has no microbatch groups: leave microbatch_group_size (G) out, or choose "
                f"{_names(lambda f: f.takes_group)}"
            )
        numbers["microbatch_group_size"] = microbatch_group_size
    return family.generator(**numbers)


def _find(name: str) -> Family:
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ScheduleError(f"no schedule is called {name!r}: choose {_names(lambda _: True)}")


def _names(chosen: Callable[[Family], bool]) -> str:
    return " or ".join(family.name for family in FAMILIES if chosen(family))
