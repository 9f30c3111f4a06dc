"""The table of schedules: what each is called, costs and demands.

The command line, the documentation and `build` read this one table. Formulas are text for people,
hold for stages that cost the same and no hop latency, and are tested against the simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fullbore.errors import ScheduleError
from fullbore.ir import Schedule
from fullbore.schedules.dualpipe import dualpipe
from fullbore.schedules.dualpipe_v import dualpipe_v
from fullbore.schedules.eager_1f1b import eager_1f1b
from fullbore.schedules.gis import gis
from fullbore.schedules.gis_h import gis_h
from fullbore.schedules.gpipe import gpipe
from fullbore.schedules.hanayo import hanayo
from fullbore.schedules.interleaved import interleaved
from fullbore.schedules.looped_bfs import looped_bfs
from fullbore.schedules.one_f_one_b import one_f_one_b
from fullbore.schedules.seq1f1b import seq1f1b
from fullbore.schedules.v_half import v_half
from fullbore.schedules.v_min import v_min
from fullbore.schedules.zb_h1 import zb_h1
from fullbore.schedules.zb_h2 import zb_h2
from fullbore.schedules.zb_v import zb_v

__all__ = ["FAMILIES", "Family", "build"]

_DEFAULT_VIRTUAL_STAGES = 2
_DEFAULT_SLICES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of schedule.

    name: as on the command line. summary: one line. bubble: bubble fraction, idle / total.
    bubble_overhead: idle / ideal. memory: peak activations of the worst rank, in microbatches
    x 1/P of the model. constraints: what P, v, M and G must satisfy. holds: for which costs the
    bubbles are exact; memory is always exact. stages_a_rank: v, where it cannot be chosen. runs:
    whether the runtime can carry it out.

    In formulas i is the idle time of a rank, F, I and W the seconds of a stage, B = I + W, and T
    their sum F + B.
    """

    name: str
    generator: Callable[..., Schedule]
    summary: str
    bubble: str
    bubble_overhead: str
    memory: str
    constraints: str
    holds: str = "exact"
    stages_a_rank: int | None = 1
    takes_virtual_stages: bool = False
    takes_group: bool = False
    takes_slices: bool = False
    runs: bool = True

    @property
    def default_virtual_stages(self) -> int:
        """v, where nobody says it."""
        return _DEFAULT_VIRTUAL_STAGES if self.stages_a_rank is None else self.stages_a_rank


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
        stages_a_rank=None,
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
        stages_a_rank=None,
        takes_virtual_stages=True,
    ),
    Family(
        name="eager-1f1b",
        generator=eager_1f1b,
        summary="1F1B with twice the warm-up, so that hops have time: they add 2(P-1)c for any M",
        bubble="(P-1)/(M+P-1)",
        bubble_overhead="(P-1)/M",
        memory="min(2P-1, M); rank r: min(2(P-r)-1, M)",
        constraints="P >= 1, M >= 1",
    ),
    Family(
        name="zb-h1",
        generator=zb_h1,
        summary="1F1B with a split backward: W fills idle time, at 1F1B's memory",
        bubble="i/(MT+i), i = (P-1)(F+I-W), where M >= P",
        bubble_overhead="i/(MT)",
        memory="min(P, M), on every rank",
        constraints="P >= 1, M >= 1",
        holds="exact where W <= F and W <= I, else more",
    ),
    Family(
        name="zb-h2",
        generator=zb_h2,
        summary="ZB-H1 with twice the warm-up: no bubble within a span, for twice the memory",
        bubble="i/(MT+i), i = (P-1)F where F = I = W; of the span i = (P-1)(F+I-2W), M >= 2P-1",
        bubble_overhead="i/(MT)",
        memory="min(2P-1, M), on every rank",
        constraints="P >= 1, M >= 1",
        holds="of the span exact where W <= F and W <= I; else exact where F = I = W",
    ),
    Family(
        name="zb-v",
        generator=zb_v,
        summary="two stages a rank in a V: no bubble within a rank's span, at 1F1B's memory",
        bubble="i/(2MT+i), i = (P-1)F; of the span 0; M >= 2P",
        bubble_overhead="i/(2MT)",
        memory="P, the same on every rank, where M >= 2P",
        constraints="P >= 1, v = 2, any M >= 1",
        holds="exact where F = I = W, approximate elsewhere",
        stages_a_rank=2,
    ),
    Family(
        name="v-half",
        generator=v_half,
        summary="two stages a rank in a V, at half of 1F1B's memory",
        bubble="i/(2MT+i), i = (3P-7)F, or (3P-4)F for odd P; P > 2, M >= 2P",
        bubble_overhead="i/(2MT)",
        memory="(P+2)//2",
        constraints="P >= 1, v = 2, any M >= 1",
        holds="exact where F = I = W, approximate elsewhere",
        stages_a_rank=2,
    ),
    Family(
        name="v-min",
        generator=v_min,
        summary="two stages a rank in a V, at a third of 1F1B's memory",
        bubble="i/(2MT+i), i = (4P-5)F, or (4P-7)F where 3 divides P; P > 1, M >= 2P",
        bubble_overhead="i/(2MT)",
        memory="(P+4)//3",
        constraints="P >= 1, v = 2, any M >= 1",
        holds="exact where F = I = W; elsewhere idle time grows with M",
        stages_a_rank=2,
    ),
    Family(
        name="gis",
        generator=gis,
        summary="interleaving with 1F1B's warm-up and a split backward: 1F1B's memory",
        bubble="i/(vMT+i), i = (P-1)(F+I), where G = P divides M",
        bubble_overhead="i/(vMT)",
        memory="min(((v-1)G+P)/v, M); rank r: min(((v-1)G+P-r)/v, M)",
        constraints="P >= 1, v >= 1, any M >= 1, 2G >= P (default P)",
        stages_a_rank=None,
        takes_virtual_stages=True,
        takes_group=True,
    ),
    Family(
        name="gis-h",
        generator=gis_h,
        summary="GIS in groups of P/2: down to half of 1F1B's memory as v grows",
        bubble="i/(vMT+i), i = 2(P-1)F + (v-1)(P//2)F, where G divides M",
        bubble_overhead="i/(vMT)",
        memory="min(((v-1)G+P)/v, M), G = (P+1)//2",
        constraints="P >= 1, v >= 1, any M >= 1",
        holds="exact where F = I = W, approximate elsewhere",
        stages_a_rank=None,
        takes_virtual_stages=True,
    ),
    Family(
        name="hanayo",
        generator=hanayo,
        summary="v/2 waves down the ranks and up again, whole backwards, P microbatches under way",
        bubble="i/(vMT+i), i = 4(P-1)F where v = 2, M = P; about that for larger v, M > P more",
        bubble_overhead="i/(vMT)",
        memory="min(P, M)",
        constraints="P >= 1, v >= 2 and even, any M >= 1",
        holds="exact where v = 2, M = P, B = 2F, approximate elsewhere",
        stages_a_rank=None,
        takes_virtual_stages=True,
    ),
    Family(
        name="dualpipe-v",
        generator=dualpipe_v,
        summary="DualPipe's order folded into a V of two stages a rank",
        bubble="i/(2MT+i), i = (P-1)(F+I-W), M >= 2P",
        bubble_overhead="i/(2MT)",
        memory="P + 1/2, where M >= 2P and P > 1",
        constraints="P >= 1, v = 2, any M >= 1",
        holds="exact where F = I = W, approximate elsewhere",
        stages_a_rank=2,
    ),
    Family(
        name="dualpipe",
        generator=dualpipe,
        summary="two directions at once, for which each rank holds two stages: parameters twice",
        bubble="i/(MT+i), i = (P/2-1)(F+I-W), M >= 2P and even",
        bubble_overhead="i/(MT)",
        memory="P + 1, where M >= 2P; parameters and gradients twice",
        constraints="P even, any M >= 1; simulated, not run",
        holds="exact where F = I = W, approximate elsewhere",
        runs=False,
        stages_a_rank=2,
    ),
    Family(
        name="seq1f1b",
        generator=seq1f1b,
        summary="1F1B over k slices of each sequence, keys and values carried from slice to slice",
        bubble="(P-1)/(kM+P-1)",
        bubble_overhead="(P-1)/(kM)",
        memory="min((P+k-1)/k, M); rank r: min((P-r+k-1)/k, M)",
        constraints="P >= 1, M >= 1, k >= 1 (default 4); slices of equal cost in these formulas",
        takes_slices=True,
    ),
)


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    microbatch_group_size: int | None = None,
    slices: int | None = None,
) -> Schedule:
    """Make the schedule of this name, as the command line does.

    virtual_stages: v, by default 2 where it can be chosen. microbatch_group_size: G, by default P.
    slices: k, by default 4 where sequences are sliced. Raises ScheduleError for an unknown name, a
    number that the schedule does not take, or one that breaks its rules; the message names the
    nearest legal values.
    """
    family = _find(name)
    numbers = {"ranks": ranks, "microbatches": microbatches}
    if family.takes_virtual_stages:
        numbers["virtual_stages"] = (
            family.default_virtual_stages if virtual_stages is None else virtual_stages
        )
    elif virtual_stages not in (None, family.stages_a_rank):
        raise ScheduleError(
            f"{name} has {_stages_a_rank(family)}, so virtual_stages (v) = {virtual_stages} is not "
            f"legal: leave it at {family.stages_a_rank}, or choose "
            f"{_names(lambda f: f.takes_virtual_stages)}"
        )
    if family.takes_slices:
        numbers["slices"] = _DEFAULT_SLICES if slices is None else slices
    elif slices not in (None, 1):
        raise ScheduleError(
            f"{name} does not cut sequences, so slices (k) = {slices} is not legal: leave it at 1, "
            f"or choose {_names(lambda f: f.takes_slices)}"
        )
    if microbatch_group_size is not None:
        if not family.takes_group:
            raise ScheduleError(
                f"{name} has no microbatch groups: leave microbatch_group_size (G) out, or choose "
                f"{_names(lambda f: f.takes_group)}"
            )
        numbers["microbatch_group_size"] = microbatch_group_size
    return family.generator(**numbers)


def _stages_a_rank(family: Family) -> str:
    count = family.stages_a_rank
    return "one stage a rank" if count == 1 else f"{count} stages a rank"


def _find(name: str) -> Family:
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ScheduleError(f"no schedule is called {name!r}: choose {_names(lambda _: True)}")


def _names(chosen: Callable[[Family], bool]) -> str:
    return " or ".join(family.name for family in FAMILIES if chosen(family))
