"""What the ranks hand over: a setting that all schedules share, and a measurement of each."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from fullbore.ir import Schedule
from fullbore.timeline import Timeline

__all__ = ["Length", "Measurement", "Setting", "Training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How many steps each schedule runs, of which the first warmup_steps are not measured."""

    steps: int
    warmup_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What only a real training job has; a paced one moves no numbers.

    model: its class and size, as text; text: what it is trained on, as text. tokens: of one step.
    flops: model FLOPs of one step, counted as flops_count says. peak_flops: FLOP/s of all ranks
    together, obtained as peak_source says.
    """

    model: str
    text: str
    tokens: int
    flops: float
    flops_count: str
    peak_flops: float
    peak_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was the same for every schedule.

    steps: of each schedule, of which the first warmup_steps are not measured. cores: of the
    machine, for this job; threads: compute threads of a rank. message_bytes: one boundary
    activation. pace: how long paced stages sleep, as text; None where training is real.
    """

    ranks: int
    microbatches: int
    steps: int
    warmup_steps: int
    overlap: bool
    device: str
    cores: int
    threads: int
    message_bytes: int
    training: Training | None = None
    pace: str | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes the measured figures say little, in plain words."""
        if self.device != "cpu" or self.pace is not None or self.ranks <= self.cores:
            return ()
        return (
            f"{self.ranks} ranks share {self.cores} {'core' if self.cores == 1 else 'cores'}: "
            "they take turns, so the measured bubble, step time and MFU are those of the sharing "
            "and not of the schedules; fullbore compare --paced measures more ranks than cores",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measurement:
    """One schedule, run and measured.

    schedule: compute actions only. timelines, step_s: of the measured steps, at least one; a
    step lasts from its batch to the last rank's optimizer. losses: of all steps, warm-up included;
    empty where there is none. held_out_before, held_out_after: mean loss on text that is not
    trained on. peak_activation_bytes: [P], the most of all measured steps.
    stage_activation_bytes: [S], what one microbatch's forward keeps. stage_held_bytes: [S], what
    waits for it between I and W; None where no backward is split. stage_input_bytes: [S], what is
    kept for it until it is recomputed; None where nothing is. stage_offload_bytes: [S], what of it
    leaves for the host; None where nothing does. complete: False where the
    run was stopped before its last step.
    """

    schedule: Schedule
    timelines: tuple[Timeline, ...]
    step_s: tuple[float, ...]
    losses: tuple[float, ...] = ()
    held_out_before: float | None = None
    held_out_after: float | None = None
    peak_activation_bytes: tuple[int, ...] | None = None
    stage_activation_bytes: tuple[int, ...] | None = None
    stage_held_bytes: tuple[int, ...] | None = None
    stage_input_bytes: tuple[int, ...] | None = None
    stage_offload_bytes: tuple[int, ...] | None = None
    complete: bool = True

    @property
    def label(self) -> str:
        """The schedule's name, with v where a rank has several stages, k where there are slices."""
        v, k = self.schedule.virtual_stages, self.schedule.slices
        return self.schedule.name + (f" v={v}" if v > 1 else "") + (f" k={k}" if k > 1 else "")

    @property
    def typical(self) -> Timeline:
        """The step whose makespan is the median one (of an even number, the lower of two)."""
        by_length = sorted(self.timelines, key=lambda timeline: timeline.makespan_s)
        return by_length[(len(by_length) - 1) // 2]

    @property
    def median_step_s(self) -> float:
        """The median length of a whole step."""
        return median(self.step_s)

    @property
    def rest_s(self) -> float:
        """What of a step is not the pipeline's: clipping, optimizer, agreement; the median."""
        spent = zip(self.step_s, self.timelines, strict=True)
        return max(0.0, median(step_s - timeline.makespan_s for step_s, timeline in spent))
