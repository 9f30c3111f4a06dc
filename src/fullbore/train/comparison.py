"""One job under several schedules, in one set of processes: what each rank does.

For each schedule everything is made anew from the same beginning, run for some steps and let go,
so that schedules differ in nothing else. A `Job` makes a `Runner` for each: a trainer (`trained`)
or stages that sleep (`paced`). The leading rank hands each schedule's measurement over as soon as
it is there, so that what was measured survives whatever comes later.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from fullbore.compare import Length, Measurement, Setting
from fullbore.ir import Schedule
from fullbore.timeline import Timeline
from fullbore.train.place import RankPlace, cores_here, device_for, joined
from fullbore.train.team import Team

__all__ = [
    "Handover",
    "Job",
    "Machine",
    "Made",
    "Runner",
    "Stepped",
    "Watcher",
    "compare_on_rank",
    "measure",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One step of a schedule; loss is None where nothing is computed."""

    step_s: float
    loss: float | None
    timeline: Timeline
    peak_activation_bytes: tuple[int, ...] | None
    stage_activation_bytes: tuple[int, ...] | None
    stage_held_bytes: tuple[int, ...] | None
    stage_input_bytes: tuple[int, ...] | None
    stage_offload_bytes: tuple[int, ...] | None = None


class Runner(Protocol):
    """One rank of a job under one schedule; every rank calls, in the same order."""

    @property
    def schedule(self) -> Schedule: ...
    def evaluate(self) -> float | None: ...
    def step(self) -> Stepped: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this rank runs on. cores: of the machine, for all its ranks; threads: of this one."""

    team: Team
    device: torch.device
    cores: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A runner that is ready, and the setting that it shares with the others of its job."""

    runner: Runner
    setting: Setting


class Job(Protocol):
    """What is compared, picklable; make(i, ...) is called on every rank for each schedule i.

    ranks: P. device: auto, cpu or cuda. threads: of a rank; None shares the cores out. imports:
    modules that every rank needs.
    """

    @property
    def schedules(self) -> Sequence[Schedule]: ...
    @property
    def length(self) -> Length: ...
    @property
    def device(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def imports(self) -> Sequence[str]: ...
    def make(self, index: int, machine: Machine) -> Made: ...


class Watcher(Protocol):
    """Who is told how far a comparison is: a progress bar, or nobody."""

    def prepare(self, schedule: Schedule) -> None: ...
    def stepped(self, schedule: Schedule, stepped: Stepped) -> None: ...


class Handover:
    """A folder through which the leading rank gives measurements to whoever writes the report."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, setting: Setting, measurement: Measurement) -> None:
        """Hand one schedule's measurement over; it is there whole or not at all."""
        number = len(list(self._folder.glob("*.measured")))
        unfinished = self._folder / "unfinished"
        unfinished.write_bytes(pickle.dumps((setting, measurement)))
        unfinished.rename(self._folder / f"{number:04}.measured")

    def take(self) -> tuple[Setting | None, list[Measurement]]:
        """The setting, and the measurements so far; None where nothing was measured."""
        files = sorted(self._folder.glob("*.measured"))
        handed = [pickle.loads(file.read_bytes()) for file in files]
        return (handed[0][0] if handed else None), [measurement for _, measurement in handed]


def compare_on_rank(
    job: Job,
    handover: Handover,
    place: RankPlace,
    *,
    watcher: Watcher,
    should_stop: Callable[[], bool],
) -> None:
    """Run every schedule of a job in turn; the leading rank hands over what was measured.

    Ends early, within a step, when should_stop() is true on any rank. Raises FullboreError.
    """
    cores, device = cores_here(), device_for(place, job.device)
    threads = job.threads or max(1, cores // place.local_size)
    torch.set_num_threads(threads)
    with joined(place, device, ranks=job.schedules[0].ranks) as team:
        machine = Machine(team=team, device=device, cores=cores, threads=threads)
        for index, schedule in enumerate(job.schedules):
            watcher.prepare(schedule)
            made = job.make(index, machine)
            measured = measure(
                made.runner, job.length, team=team, watcher=watcher, should_stop=should_stop
            )
            made.runner.close()
            if measured is not None and team.leads:
                handover.put(made.setting, measured)
            if measured is None or not measured.complete:
                return
            del made  # weights and optimizer, before the next ones are made
            gc.collect()


def measure(
    runner: Runner,
    length: Length,
    *,
    team: Team,
    watcher: Watcher,
    should_stop: Callable[[], bool],
) -> Measurement | None:
    """Run one schedule for its steps, or until should_stop() is true on any rank.

    Returns the same on every rank, but for None where no step was measured. Raises FullboreError.
    """
    before = runner.evaluate()
    done: list[Stepped] = []
    while len(done) < length.steps and not team.any(should_stop()):
        done.append(runner.step())
        watcher.stepped(runner.schedule, done[-1])
    complete = len(done) == length.steps
    after = runner.evaluate() if complete else None
    measured = done[length.warmup_steps :]
    if not measured:
        return None
    peaks = [stepped.peak_activation_bytes for stepped in measured if stepped.peak_activation_bytes]
    return Measurement(
        schedule=runner.schedule,
        timelines=tuple(stepped.timeline for stepped in measured),
        step_s=tuple(stepped.step_s for stepped in measured),
        losses=tuple(stepped.loss for stepped in done if stepped.loss is not None),
        held_out_before=before,
        held_out_after=after,
        peak_activation_bytes=tuple(map(max, zip(*peaks, strict=True))) or None,
        stage_activation_bytes=measured[-1].stage_activation_bytes,
        stage_held_bytes=measured[-1].stage_held_bytes,
        stage_input_bytes=measured[-1].stage_input_bytes,
        stage_offload_bytes=measured[-1].stage_offload_bytes,
        complete=complete,
    )
