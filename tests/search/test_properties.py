"""What holds for every search: lawful, within memory, as good as any named one, above the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from search_cases import cases

from fullbore.cost import Costs
from fullbore.cost.recut import recut
from fullbore.errors import ConfigError, ScheduleError
from fullbore.ir import Schedule
from fullbore.schedules import FAMILIES, build
from fullbore.search import Job
from fullbore.sim import simulate
from fullbore.timeline import live_curves, summarize
from fullbore.verify import verify

# The first search on a machine compiles its kernels, which takes long where others want the cores.
pytestmark = pytest.mark.timeout(400)


def peaks(schedule: Schedule, costs: Costs, *, in_bytes: bool) -> list[float]:
    """What each rank holds at the most, by the timeline's own account."""
    timeline = simulate(schedule, costs)
    if not in_bytes:
        return [curve.peak for curve in live_curves(timeline, schedule)]
    held = [stage.activation_bytes for stage in costs.stages]
    curves = live_curves(
        timeline,
        schedule,
        held_after_forward=held,
        held_after_input_grad=[
            whole if stage.input_grad_held_bytes is None else stage.input_grad_held_bytes
            for stage, whole in zip(costs.stages, held, strict=True)
        ],
        held_before_recompute=[stage.recompute_input_bytes for stage in costs.stages],
    )
    return [curve.peak for curve in curves]


def fits(job: Job, schedule: Schedule, costs: Costs) -> bool:
    limit = job.memory_limit
    if limit is None:
        return True
    most = limit.resolve(job.costs, ranks=job.ranks, microbatches=job.microbatches)
    in_bytes = limit.counts_bytes(job.costs)
    return bool((peaks(schedule, costs, in_bytes=in_bytes) <= most * (1 + 1e-6)).all())


def value_s(job: Job, schedule: Schedule, costs: Costs) -> float:
    timeline = simulate(schedule, costs)
    if not job.spans:
        return timeline.makespan_s
    summary = summarize(timeline, schedule)
    return sum(summary.busy_s) / schedule.ranks / (1 - summary.span_bubble_fraction)


def named(job: Job) -> dict[str, float]:
    """The objective of every named schedule that fits, built and simulated here."""
    have, found = len(job.costs.stages), {}
    for v in (v for v in range(1, 9) if have % (job.ranks * v) == 0):
        for family in (f for f in FAMILIES if f.runs and not f.takes_slices):
            takes = {"virtual_stages": v} if family.takes_virtual_stages else {}
            size = {"ranks": job.ranks, "microbatches": job.microbatches}
            try:
                schedule = build(family.name, **size, **takes)
            except ScheduleError:
                continue
            if have % schedule.stages == 0:
                costs = recut(job.costs, stages=schedule.stages)
                splits = all(one.is_split for one in costs.stages)
                if (splits or not schedule.splits_backward) and fits(job, schedule, costs):
                    found[f"{family.name} {v}"] = value_s(job, schedule, costs)
    return found


@settings(max_examples=200)
@given(cases())
def test_a_found_schedule_is_lawful_fits_and_lies_between_bound_and_named(case):
    try:
        found = case.found()
    except ConfigError as error:
        assert "too tight" in str(error)
        assert not named(case.job)
        return
    assert verify(found.schedule) == []
    assert fits(case.job, found.schedule, found.costs)
    assert value_s(case.job, found.schedule, found.costs) == pytest.approx(found.value_s, rel=1e-12)
    if not case.job.spans:
        assert simulate(found.schedule, found.costs).makespan_s == found.value_s
    assert found.bound_s <= found.value_s
    for name, seconds in named(case.job).items():
        assert found.value_s <= seconds * (1 + 1e-12), name


@settings(max_examples=20)
@given(cases())
def test_a_seed_gives_the_same_schedule_again(case):
    try:
        found = case.found(3000)
    except ConfigError:
        return
    assert case.found(3000).schedule == found.schedule
