"""Slack is what it says: an action that ends later by it moves nothing, by more it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore import passes, schedules
from fullbore.cost import Costs
from fullbore.sim.engine import problem_of, run
from fullbore.sim.spans import lay_out
from fullbore.timeline import Timeline, Transit, slack

EIGHTHS = st.integers(min_value=0, max_value=24).map(lambda n: n / 8)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-v", "zb-h1"]))
    schedule = schedules.build(
        name, ranks=draw(st.integers(1, 4)), microbatches=draw(st.integers(1, 5))
    )
    if draw(st.booleans()):
        schedule = passes.insert_communication(schedule)
    if draw(st.booleans()):
        schedule = passes.offload(schedule)
    stage = st.fixed_dictionaries(
        {"forward_s": EIGHTHS, "input_grad_s": EIGHTHS, "weight_grad_s": EIGHTHS}
    )
    copies = {"offload_s": draw(EIGHTHS), "reload_s": draw(EIGHTHS)}
    costs = Costs.parse(
        {
            "stages": [draw(stage) | copies for _ in range(schedule.stages)],
            "hop_s": draw(EIGHTHS),
            "message_bytes": draw(st.sampled_from([0, 3])),
            "bandwidth_bytes_per_s": 8,
            "overhead_s": draw(st.sampled_from([0, 0.25])),
        }
    )
    return schedule, costs, draw(st.booleans())


def timeline_of(schedule, costs, overlap, longer=None) -> Timeline:
    """The simulated timeline; longer: seconds more [N] of each action of the programs."""
    problem = problem_of(schedule, costs)
    if longer is not None:
        problem = replace(problem, duration_s=problem.duration_s + longer)
    times = run(schedule, problem, costs, blocking=not overlap)
    return lay_out(schedule, problem, times, overlap=overlap)


@settings(max_examples=30)
@given(cases())
def test_an_action_may_slip_by_its_slack_and_no_more(case):
    schedule, costs, overlap = case
    timeline = timeline_of(schedule, costs, overlap)
    transit = Transit(
        occupancy_s=costs.occupancy_s,
        hop_s=costs.hop_s,
        overhead_s=costs.overhead_s,
        blocking=not overlap,
    )
    free_s = slack(timeline, schedule, transit)[timeline.is_compute]
    flat = schedule.flat()
    actions = np.flatnonzero(np.isin(flat.kind, timeline.kind[timeline.is_compute]))
    for index, slip_s in zip(actions.tolist(), free_s.tolist(), strict=True):
        longer = np.zeros(len(flat.kind))
        longer[index] = slip_s
        assert timeline_of(schedule, costs, overlap, longer).makespan_s == timeline.makespan_s
        longer[index] += 0.125
        moved = timeline_of(schedule, costs, overlap, longer).makespan_s
        assert moved == timeline.makespan_s + 0.125
