"""What holds for every schedule and all costs.

Costs are multiples of 1/8 s, so that floating-point sums are exact and equality means equality.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore import passes, schedules
from fullbore.cost import Costs
from fullbore.ir import COPY_KINDS, Kind, Schedule, dependencies, from_text, to_text
from fullbore.sim import simulate
from fullbore.timeline import Timeline, critical_path, live_curves, summarize

EIGHTHS = st.integers(min_value=0, max_value=24).map(lambda n: n / 8)
SOME_EIGHTHS = st.integers(min_value=1, max_value=24).map(lambda n: n / 8)


@dataclass(frozen=True)
class Case:
    schedule: Schedule
    costs: Costs
    overlap: bool

    def simulate(self) -> Timeline:
        return simulate(self.schedule, self.costs, overlap=self.overlap)


@st.composite
def built(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "looped-bfs"]))
    ranks, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    looped = name in ("interleaved", "looped-bfs")
    schedule = schedules.build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=draw(st.integers(2, 3)) if looped else None,
    )
    if draw(st.booleans()):
        schedule = _split(schedule)
    if draw(st.booleans()):
        ahead, away = draw(st.integers(0, 4)), draw(st.integers(1, 3))
        schedule = passes.offload(schedule, ahead=ahead, away=away)
    return passes.insert_communication(schedule) if draw(st.booleans()) else schedule


def _split(schedule: Schedule) -> Schedule:
    """Every B as an I with its W right behind it."""
    split = re.sub(r"(\d+)B(\d+)", r"\1I\2,\1W\2", to_text(schedule))
    return from_text(split, name=schedule.name)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schedule = draw(built())
    stages = [
        {
            "forward_s": draw(SOME_EIGHTHS),
            "input_grad_s": draw(SOME_EIGHTHS),
            "weight_grad_s": draw(EIGHTHS),
            "offload_s": draw(EIGHTHS),
            "reload_s": draw(EIGHTHS),
        }
        for _ in range(schedule.stages)
    ]
    costs = Costs.parse(
        {
            "stages": stages,
            "hop_s": draw(EIGHTHS),
            "message_bytes": draw(st.sampled_from([0, 1, 3, 16])),
            "bandwidth_bytes_per_s": 8,
            "overhead_s": draw(EIGHTHS),
        }
    )
    return Case(schedule, costs, draw(st.booleans()))


def own_spans(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {
        str(span.action): (span.start_s, span.end_s)
        for span in timeline
        if span.action.kind < Kind.SEND_F
    }


@given(cases())
def test_every_action_runs_once_and_takes_its_time(case):
    seconds = {
        Kind.F: lambda stage: stage.forward_s,
        Kind.B: lambda stage: stage.backward_s,
        Kind.I: lambda stage: stage.input_grad_s,
        Kind.W: lambda stage: stage.weight_grad_s,
        Kind.OFFLOAD: lambda stage: stage.offload_s,
        Kind.RELOAD: lambda stage: stage.reload_s,
    }
    spans = [span for span in case.simulate() if span.action.kind < Kind.SEND_F]
    for span in spans:
        cost = seconds[span.action.kind](case.costs.stages[span.action.stage])
        assert span.end_s - span.start_s == cost
    ran = [(span.rank, span.action) for span in spans]
    programs = passes.strip_communication(case.schedule).programs
    assert ran == [(r, action) for r, program in enumerate(programs) for action in program]


@given(cases())
def test_no_action_starts_before_what_it_needs(case):
    timeline = case.simulate()
    times = own_spans(timeline)
    plain = passes.strip_communication(case.schedule)
    flat, deps = plain.flat(), dependencies(plain)
    for index in range(len(flat.kind)):
        start_s, _ = times[str(flat.action(index))]
        if deps.stored[index] >= 0:
            assert start_s >= times[str(flat.action(int(deps.stored[index])))][1]
        if deps.value[index] >= 0:
            source = int(deps.value[index])
            away = flat.rank[source] != flat.rank[index]
            transit_s = case.costs.occupancy_s + case.costs.hop_s if away else 0.0
            assert start_s >= times[str(flat.action(source))][1] + transit_s


@given(cases())
def test_one_action_at_a_time_on_a_rank(case):
    timeline = case.simulate()
    for rank in range(timeline.ranks):
        chosen = timeline.is_compute & (timeline.rank == rank)
        free_s = [0.0, *timeline.end_s[chosen][:-1].tolist()]
        for start_s, before_s in zip(timeline.start_s[chosen].tolist(), free_s, strict=True):
            assert start_s >= before_s + case.costs.overhead_s


@given(cases())
def test_copies_of_a_rank_follow_one_another_while_it_goes_on(case):
    timeline = case.simulate()
    for rank in range(timeline.ranks):
        spans = [span for span in timeline if span.rank == rank]
        reached_s = copied_s = 0.0
        for span in spans:
            if span.action.kind in COPY_KINDS:
                assert span.start_s == max(reached_s, copied_s)
                copied_s = span.end_s
            elif span.action.kind < Kind.SEND_F or not case.overlap:
                reached_s = span.end_s


@given(cases())
def test_messages_of_a_link_do_not_overlap(case):
    timeline = case.simulate()
    left_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    for span in timeline:
        if span.action.kind in (Kind.SEND_F, Kind.SEND_B):
            to = span.action.stage + (1 if span.action.kind == Kind.SEND_F else -1)
            link = span.rank, case.schedule.placement.stage_to_rank[to]
            hop_s = 0.0 if case.overlap else case.costs.hop_s
            left_s[link].append(span.end_s - hop_s)
    for ends_s in left_s.values():
        for before_s, after_s in pairwise(ends_s):
            assert after_s - before_s >= case.costs.occupancy_s


@given(cases())
def test_makespan_is_at_least_both_lower_bounds(case):
    figures = summarize(case.simulate(), case.schedule)
    assert figures.makespan_s >= max(figures.busy_s)
    # One microbatch, through all stages and back; behind the last I, its W if there is one.
    owners = case.schedule.placement.stage_to_rank
    hops = sum(a != b for a, b in pairwise(owners))
    way_s = sum(s.forward_s + s.input_grad_s for s in case.costs.stages)
    way_s += case.costs.stages[0].weight_grad_s
    way_s += 2 * hops * (case.costs.occupancy_s + case.costs.hop_s)
    assert figures.makespan_s >= way_s


@given(cases())
def test_figures_sum_up(case):
    figures = summarize(case.simulate(), case.schedule)
    parts = zip(
        figures.busy_s,
        figures.idle_s,
        figures.warmup_idle_s,
        figures.steady_idle_s,
        figures.cooldown_idle_s,
        figures.imbalance_s,
        strict=True,
    )
    for busy, idle, warm, steady, cool, imbalance in parts:
        assert busy + idle == figures.makespan_s
        assert warm + steady + cool == idle
        assert min(warm, steady, cool, imbalance) >= 0
        assert imbalance <= idle
    ranks = case.schedule.ranks
    assert figures.bubble_fraction == pytest.approx(
        sum(figures.idle_s) / (ranks * figures.makespan_s)
    )
    ratio = figures.bubble_overhead
    assert figures.bubble_fraction == pytest.approx(ratio / (1 + ratio))
    assert 0 <= figures.span_bubble_fraction <= figures.bubble_fraction < 1


@given(cases())
def test_everything_is_let_go_in_the_end(case):
    timeline = case.simulate()
    for curve in live_curves(timeline, case.schedule):
        assert curve.values[0] == 0
        assert curve.values[-1] == pytest.approx(0)
        assert (curve.values > -1e-9).all()
        assert (curve.times_s[1:] >= curve.times_s[:-1]).all()


@given(cases(), st.sampled_from([0.25, 4.0, 1024.0]))
def test_time_has_no_unit(case, factor):
    """All times scaled alike, every span scales alike."""
    scaled = {
        "stages": [
            {name: value * factor for name, value in stage if name.endswith("_s") and value}
            | {
                name: (getattr(stage, name) or 0) * factor
                for name in ("weight_grad_s", "offload_s", "reload_s")
            }
            for stage in case.costs.stages
        ],
        "hop_s": case.costs.hop_s * factor,
        "message_bytes": case.costs.message_bytes * factor,
        "bandwidth_bytes_per_s": case.costs.bandwidth_bytes_per_s,
        "overhead_s": case.costs.overhead_s * factor,
    }
    slow = simulate(case.schedule, Costs.parse(scaled), overlap=case.overlap)
    timeline = case.simulate()
    assert (slow.start_s == timeline.start_s * factor).all()
    assert (slow.end_s == timeline.end_s * factor).all()


@given(cases())
def test_slower_never_ends_sooner(case):
    """Neither a longer hop nor sends that block can shorten a step."""
    patient = case.costs.model_copy(update={"hop_s": case.costs.hop_s + 0.5})
    now_s = case.simulate().makespan_s
    assert simulate(case.schedule, patient, overlap=case.overlap).makespan_s >= now_s
    assert simulate(case.schedule, case.costs, overlap=False).makespan_s >= now_s


@given(cases())
def test_written_out_messages_change_nothing(case):
    plain = passes.strip_communication(case.schedule)
    written = passes.insert_communication(plain)
    first, second = (simulate(s, case.costs, overlap=case.overlap) for s in (plain, written))
    assert own_spans(first) == own_spans(second)


@settings(max_examples=60)
@given(cases())
def test_the_slow_way_gives_the_same_times(case):
    plain = passes.strip_communication(case.schedule)
    timeline = simulate(plain, case.costs, overlap=case.overlap)
    assert own_spans(timeline) == _by_relaxation(plain, case.costs, overlap=case.overlap)


def _by_relaxation(
    schedule: Schedule, costs: Costs, *, overlap: bool
) -> dict[str, tuple[float, float]]:
    """The same rules written again: push every time back until nothing moves any more."""
    flat, deps = schedule.flat(), dependencies(schedule)
    seconds = [
        {
            Kind.F: costs.stages[stage].forward_s,
            Kind.B: costs.stages[stage].backward_s,
            Kind.I: costs.stages[stage].input_grad_s,
            Kind.W: costs.stages[stage].weight_grad_s,
            Kind.OFFLOAD: costs.stages[stage].offload_s,
            Kind.RELOAD: costs.stages[stage].reload_s,
        }[Kind(kind)]
        for kind, stage in zip(flat.kind.tolist(), flat.stage.tolist(), strict=True)
    ]
    count, rank, value = len(seconds), flat.rank.tolist(), deps.value.tolist()
    copies, stored = np.isin(flat.kind, COPY_KINDS).tolist(), deps.stored.tolist()
    target = {
        value[i]: rank[i] for i in range(count) if value[i] >= 0 and rank[value[i]] != rank[i]
    }
    start, arrive = [0.0] * count, [0.0] * count
    moved = True
    while moved:
        moved = False
        free = [0.0] * schedule.ranks
        link: dict[tuple[int, int], float] = defaultdict(float)
        host = [0.0] * schedule.ranks
        for i in range(count):
            if copies[i]:
                begin = max(free[rank[i]], host[rank[i]])
                host[rank[i]] = there = begin + seconds[i]
                moved |= (begin, there) != (start[i], arrive[i])
                start[i], arrive[i] = begin, there
                continue
            ready = max(free[rank[i]], arrive[value[i]] if value[i] >= 0 else 0.0)
            if stored[i] >= 0 and copies[stored[i]]:
                ready = max(ready, arrive[stored[i]])
            begin = ready + costs.overhead_s
            end = there = begin + seconds[i]
            if i in target:
                pair = rank[i], target[i]
                link[pair] = max(end, link[pair]) + costs.occupancy_s
                there = link[pair] + costs.hop_s
            free[rank[i]] = end if overlap else there
            moved |= (begin, there) != (start[i], arrive[i])
            start[i], arrive[i] = begin, there
    return {str(flat.action(i)): (start[i], start[i] + seconds[i]) for i in range(count)}


@given(cases())
def test_the_critical_path_explains_the_makespan(case):
    """Along it, time passes only in its spans, in overhead and while its messages travel."""
    timeline = case.simulate()
    path = critical_path(timeline, case.schedule)
    now_s = 0.0
    for index in path:
        kind, end_s = timeline.kind[index], float(timeline.end_s[index])
        if kind in COPY_KINDS:
            assert timeline.start_s[index] == now_s
        elif kind < Kind.SEND_F:
            assert timeline.start_s[index] == now_s + case.costs.overhead_s
        elif kind in (Kind.SEND_F, Kind.SEND_B):
            assert timeline.start_s[index] <= now_s
            blocked_s = 0.0 if case.overlap else case.costs.hop_s
            assert end_s == now_s + case.costs.occupancy_s + blocked_s
        else:
            assert end_s == now_s + (case.costs.hop_s if case.overlap else 0.0)
        now_s = end_s
    assert now_s == timeline.makespan_s
