"""Where a search starts: placements of the stages, and the named schedules that fit each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullbore.cost import Costs
from fullbore.cost.recut import recut
from fullbore.errors import ConfigError, CostsError, ScheduleError
from fullbore.ir import Placement, Schedule
from fullbore.passes import strip_communication
from fullbore.schedules import FAMILIES, build
from fullbore.search.evaluate import evaluate, is_legal, objective
from fullbore.search.instance import Instance, has_room, instance_of, work_for
from fullbore.search.memory import Footprint, MemoryLimit
from fullbore.search.relief import Means
from fullbore.search.tokens import Tokens, tokens_of

__all__ = ["Candidate", "Job", "Named", "candidates", "evaluated", "fits_one", "most_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is searched for: P, M, the costs of the finest cut, and what v and memory may be.

    virtual_stages: None for every v into which the stages of the costs can be joined.
    spans: whether the longest span of one rank is what counts, instead of the makespan.
    means: by what a schedule may be brought within the memory limit, besides its order.
    """

    costs: Costs
    ranks: int
    microbatches: int
    virtual_stages: tuple[int, ...] | None
    memory_limit: MemoryLimit | None
    spans: bool
    means: tuple[Means, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A named schedule that fits, as tokens, and its objective in seconds."""

    name: str
    tokens: Tokens
    value_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One placement with its arrays, and the named schedules that use it, the best one first."""

    label: str
    placement: Placement
    costs: Costs
    instance: Instance
    named: tuple[Named, ...]


def candidates(job: Job) -> list[Candidate]:
    """Every placement that the job allows, looped, V and wave, and those of named schedules.

    Raises ConfigError where v or P do not fit the costs.
    """
    found: dict[tuple[int, ...], Candidate] = {}
    named = list(_named(job))
    for label, placement in _placements(job):
        found[placement.stage_to_rank] = _candidate(job, label, placement, named)
    for schedule in named:
        place = schedule.placement.stage_to_rank
        if place not in found:
            found[place] = _candidate(job, schedule.name, schedule.placement, named)
    return list(found.values())


def most_tokens(job: Job) -> int:
    """Tokens of the longest programs of all ranks that there can be: all backwards split."""
    return 3 * job.microbatches * job.ranks * max(_virtual_stages(job))


def fits_one(job: Job) -> bool:
    """Whether any placement has room for one microbatch at a time; quickly, without kernels.

    Raises what `candidates` does.
    """
    if any(has_room(_instance(job, placement)) for _, placement in _placements(job)):
        return True
    return any(has_room(_instance(job, schedule.placement)) for schedule in _named(job))


def _instance(job: Job, placement: Placement) -> Instance:
    costs = recut(job.costs, stages=placement.stages)
    size = {"ranks": job.ranks, "microbatches": job.microbatches}
    footprint = Footprint.of(costs, job.memory_limit, **size)
    return instance_of(costs, placement, microbatches=job.microbatches, footprint=footprint)


def _candidate(job: Job, label: str, placement: Placement, named: list[Schedule]) -> Candidate:
    instance = _instance(job, placement)
    fitting = []
    for schedule in named:
        if schedule.placement == placement and (instance.splits or not schedule.splits_backward):
            tokens = tokens_of(schedule, instance)
            value_s = evaluated(instance, tokens, spans=job.spans)
            if value_s is not None:
                fitting.append(Named(name=schedule.name, tokens=tokens, value_s=value_s))
    fitting.sort(key=lambda one: one.value_s)
    return Candidate(
        label=label,
        placement=placement,
        costs=recut(job.costs, stages=placement.stages),
        instance=instance,
        named=tuple(fitting),
    )


def evaluated(instance: Instance, tokens: Tokens, *, spans: bool) -> float | None:
    """The objective of these programs; None where they do not fit, or never end."""
    work = work_for(instance)
    for rank in range(instance.ranks):
        if not is_legal(instance, tokens.program, tokens.count, work, rank):
            return None
    if not evaluate(instance, tokens.program, tokens.count, work):
        return None
    return float(objective(work, spans))


def _placements(job: Job) -> Iterator[tuple[str, Placement]]:
    for v in _virtual_stages(job):
        yield f"looped, v={v}", Placement.looped(ranks=job.ranks, virtual_stages=v)
        if v > 1 and job.ranks > 1:
            shape = "V" if v == 2 else "wave"
            yield f"{shape}, v={v}", Placement.wave(ranks=job.ranks, virtual_stages=v)


def _virtual_stages(job: Job) -> tuple[int, ...]:
    """The v that are asked for, or all into which the costs' stages can be joined."""
    have = len(job.costs.stages)
    joined = tuple(v for v in range(1, have // job.ranks + 1) if have % (job.ranks * v) == 0)
    if job.virtual_stages is None:
        if not joined:
            raise ConfigError(
                f"the costs are of {have} stages, which {job.ranks} ranks cannot share evenly: "
                "give costs of a multiple of P stages, or choose another -p"
            )
        return joined
    for v in job.virtual_stages:
        if v < 1:
            raise ConfigError(f"--virtual-stages {v}: the nearest legal value is 1")
        try:
            recut(job.costs, stages=job.ranks * v)
        except CostsError as error:
            raise ConfigError(f"--virtual-stages {v}: {error}") from None
    return tuple(dict.fromkeys(job.virtual_stages))


def _named(job: Job) -> Iterator[Schedule]:
    """Every named schedule of whole sequences that can be run with these P and M, over every v that
    is allowed.
    """
    allowed = _virtual_stages(job)
    for family in FAMILIES:
        if not family.runs or family.takes_slices:
            continue
        for v in allowed if family.takes_virtual_stages else (None,):
            try:
                schedule = build(
                    family.name,
                    ranks=job.ranks,
                    microbatches=job.microbatches,
                    virtual_stages=v,
                )
            except ScheduleError:
                continue  # this family has no schedule of these numbers
            if schedule.virtual_stages in allowed:
                yield strip_communication(schedule)
