"""From the flags of `fullbore compare` to a job whose arithmetic has been checked.

Nothing is loaded here but the model's configuration, so a wrong number is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullbore.cli.inputs import Shape, read_schedule
from fullbore.compare import Length
from fullbore.errors import ConfigError
from fullbore.schedules import FAMILIES
from fullbore.verify import check_runnable

if TYPE_CHECKING:
    from fullbore.cost import Costs
    from fullbore.ir import Schedule
    from fullbore.train.comparison import Job
    from fullbore.train.settings import TrainSettings

__all__ = ["Asked", "Pace", "make_job"]

_RANKS = "pipeline_model_parallel_size"
_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
_OVERLAP = "overlap_p2p_communication"
_SLICES = "slices"
_SHAPE = {_RANKS, _CHUNKS, _GROUP, _OVERLAP, _SLICES, "micro_batch_size", "global_batch_size"}
_DEFAULT_BATCH = 8
_MESSAGE_BYTES = 64 * 1024
_FORWARD_S = 0.010
_LEAST_MESSAGE_BYTES = 4  # one number


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What paced stages do, as it was typed; None where it was not."""

    forward_s: float | None
    backward_s: float | None
    costs: Path | None
    message_bytes: int | None

    def typed(self) -> dict[str, object]:
        """What was typed, by flag."""
        flags = {
            "--forward-s": self.forward_s,
            "--backward-s": self.backward_s,
            "--costs": self.costs,
            "--message-bytes": self.message_bytes,
        }
        return {flag: value for flag, value in flags.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A comparison as it was typed.

    schedules: names and files. typed: what the command line said, by the names of
    `TrainSettings`; from_file: what a configuration file said. microbatches: M, None where batch
    sizes say it.
    """

    schedules: tuple[str, ...]
    typed: Mapping[str, Any]
    from_file: Mapping[str, Any]
    microbatches: int | None
    steps: int
    warmup_steps: int
    paced: bool
    pace: Pace
    output: Path


def make_job(asked: Asked) -> Job:
    """Check everything that can be checked before a process starts; raises FullboreError.

    Needs torch.
    """
    length = _length(asked)
    if not asked.schedules:
        raise ConfigError("--schedules names none: give some, such as gpipe,1f1b,interleaved")
    values = {**asked.from_file, **asked.typed}
    files = {n: read_schedule(n, _NOTHING) for n in asked.schedules if _is_file(n)}
    values[_RANKS] = _ranks(values.get(_RANKS), files)
    values = _with_microbatches(values, asked.microbatches, files)
    _refuse_unused(values, asked)
    for name, only in (("data_parallel_size", 1), ("optimizer_barrier", True)):
        if values.get(name, only) != only:
            raise ConfigError(f"{name} is {only} in a comparison: leave it out")
    return (
        _paced_job(asked, values, files, length)
        if asked.paced
        else _training_job(asked, values, files, length)
    )


# -- the same for both ----------------------------------------------------------------------------

_NOTHING = Shape(ranks=None, microbatches=None, virtual_stages=None, group_size=None)


def _length(asked: Asked) -> Length:
    if asked.steps < 1:
        raise ConfigError(f"--steps is {asked.steps}: the nearest legal value is 1")
    if not 0 <= asked.warmup_steps < asked.steps:
        legal = min(max(asked.warmup_steps, 0), asked.steps - 1)
        raise ConfigError(
            f"--warmup-steps {asked.warmup_steps} of --steps {asked.steps} leave none to measure: "
            f"the nearest legal value is {legal}"
        )
    return Length(steps=asked.steps, warmup_steps=asked.warmup_steps)


def _is_file(name: str) -> bool:
    return name not in {family.name for family in FAMILIES}


def _ranks(typed: int | None, files: Mapping[str, Schedule]) -> int:
    if typed is not None:
        return typed
    for schedule in files.values():
        return schedule.ranks
    raise ConfigError(
        "--pipeline-model-parallel-size (-p) is missing: say how many ranks there are"
    )


def _with_microbatches(
    values: Mapping[str, Any], microbatches: int | None, files: Mapping[str, Schedule]
) -> dict[str, Any]:
    """The values with a global batch size that says M, however M was said."""
    size, batch = values.get("micro_batch_size", 1), values.get("global_batch_size")
    if microbatches is None and batch is None:
        file = next(iter(files.values()), None)
        count = _DEFAULT_BATCH if file is None else file.microbatches // file.slices
        batch = count * size
    elif microbatches is not None:
        if microbatches < 1:
            raise ConfigError(f"--num-microbatches is {microbatches}: the nearest legal value is 1")
        if batch is not None and batch != microbatches * size:
            raise ConfigError(
                f"--num-microbatches {microbatches} x --micro-batch-size {size} are "
                f"{microbatches * size} sequences and --global-batch-size is {batch}: leave one of "
                f"them out, or make it {microbatches * size}"
            )
        batch = microbatches * size
    return {**values, "micro_batch_size": size, "global_batch_size": batch}


def _refuse_unused(values: Mapping[str, Any], asked: Asked) -> None:
    """A flag that no chosen schedule takes would be lost without a word."""
    chosen = [family for family in FAMILIES if family.name in asked.schedules]
    if not any(family.takes_virtual_stages for family in chosen):
        for name in (_CHUNKS, _PER_CHUNK):
            if name in asked.typed:
                takers = " and ".join(f.name for f in FAMILIES if f.takes_virtual_stages)
                raise ConfigError(
                    f"{_flag(name)} is for {takers}: compare one of them, or leave it"
                )
    if _GROUP in asked.typed and not any(family.takes_group for family in chosen):
        takers = " and ".join(f.name for f in FAMILIES if f.takes_group)
        raise ConfigError(
            f"{_flag(_GROUP)} is for {takers}: compare one of them, or leave this flag out"
        )
    if _SLICES in asked.typed and not any(family.takes_slices for family in chosen):
        raise ConfigError("--slices is for seq1f1b: compare it too, or leave this flag out")


def _refuse_differences(schedules: Sequence[Schedule], ranks: int, microbatches: int) -> None:
    """Only one job can be compared: one P, one M, and a name for each schedule."""
    for schedule in schedules:
        check_runnable(schedule)
        own = schedule.microbatches // schedule.slices
        if (schedule.ranks, own) != (ranks, microbatches):
            raise ConfigError(
                f"{schedule.name} has P={schedule.ranks} and M={own}, and the "
                f"job P={ranks} and M={microbatches}: compare schedules of one P and M"
            )
    names = [schedule.name for schedule in schedules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two schedules are called {twice}: name each once, or rename a file")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# -- training -------------------------------------------------------------------------------------


def _training_job(
    asked: Asked, values: Mapping[str, Any], files: Mapping[str, Schedule], length: Length
) -> Job:
    typed = asked.pace.typed()
    if typed:
        raise ConfigError(f"{', '.join(typed)}: only stages that sleep take it; add --paced")
    settings = [_settings(name, values, asked, where="command line") for name in asked.schedules]
    layers = _layers(settings[0])
    schedules = [
        found.placed(files[name] if name in files else found.shape(layers).build())
        for name, found in zip(asked.schedules, settings, strict=True)
    ]
    _refuse_differences(schedules, values[_RANKS], settings[0].microbatches)
    from fullbore.train.trained import TrainingJob

    return TrainingJob(schedules=tuple(schedules), settings=tuple(settings), length=length)


def _settings(name: str, values: Mapping[str, Any], asked: Asked, *, where: str) -> TrainSettings:
    """The settings of one schedule: what only others take is left out."""
    from fullbore.train.settings import TrainSettings

    family = next((family for family in FAMILIES if family.name == name), None)
    unused = set()
    if family is None or not family.takes_virtual_stages:
        unused |= {_CHUNKS, _PER_CHUNK}
    if family is None or not family.takes_group:
        unused.add(_GROUP)
    if family is None or not family.takes_slices:
        unused.add(_SLICES)
    return TrainSettings.of(
        {
            **{key: value for key, value in values.items() if key not in unused},
            "schedule": None if family is None else name,
            "train_iters": asked.steps,
            "eval_interval": asked.steps if values.get("held_out", 1) else None,
            "save": asked.output,
        },
        where=where,
    )


def _layers(settings: TrainSettings) -> int | None:
    """The model's layers where its configuration tells them; converts a GGUF file if need be."""
    from fullbore.train.sources import count_layers, find_model

    folder = find_model(
        settings.model, cache=settings.cache, needs_weights=not settings.from_scratch
    )
    return count_layers(folder)


# -- pace -----------------------------------------------------------------------------------------


def _paced_job(
    asked: Asked, values: Mapping[str, Any], files: Mapping[str, Schedule], length: Length
) -> Job:
    lost = [_flag(name) for name in asked.typed if name not in _SHAPE]
    if lost:
        raise ConfigError(f"--paced stages compute nothing: leave out {', '.join(sorted(lost))}")
    schedules = _paced_schedules(asked, values, files)
    message_bytes = _message_bytes(asked.pace)
    from fullbore.train.paced import PacedJob

    return PacedJob(
        schedules=tuple(schedules),
        costs=tuple(_costs(asked.pace, schedule) for schedule in schedules),
        pace=_in_words(asked.pace, message_bytes),
        message_bytes=message_bytes,
        overlap=values.get(_OVERLAP, True),
        length=length,
    )


def _paced_schedules(
    asked: Asked, values: Mapping[str, Any], files: Mapping[str, Schedule]
) -> list[Schedule]:
    from fullbore.megatron import count_microbatches

    microbatches = count_microbatches(
        global_batch_size=values["global_batch_size"], micro_batch_size=values["micro_batch_size"]
    )
    families = {family.name: family for family in FAMILIES}
    schedules = []
    for name in asked.schedules:
        family = families.get(name)
        shape = Shape(
            ranks=values[_RANKS],
            microbatches=microbatches,
            virtual_stages=values.get(_CHUNKS) if family and family.takes_virtual_stages else None,
            group_size=values.get(_GROUP) if family and family.takes_group else None,
            slices=values.get(_SLICES) if family and family.takes_slices else None,
        )
        schedules.append(files[name] if name in files else read_schedule(name, shape))
    _refuse_differences(schedules, values[_RANKS], microbatches)
    return schedules


def _message_bytes(pace: Pace) -> int:
    found = _MESSAGE_BYTES if pace.message_bytes is None else pace.message_bytes
    if found < _LEAST_MESSAGE_BYTES:
        raise ConfigError(
            f"--message-bytes is {found}: the nearest legal value is {_LEAST_MESSAGE_BYTES}"
        )
    return found


def _costs(pace: Pace, schedule: Schedule) -> Costs:
    """How long each stage of a schedule sleeps."""
    from fullbore.cost import Costs
    from fullbore.cost.recut import recut

    if pace.costs is not None:
        if pace.forward_s is not None or pace.backward_s is not None:
            raise ConfigError(
                f"--costs {pace.costs} already says how long stages take: leave --forward-s and "
                "--backward-s out"
            )
        return recut(Costs.load(pace.costs), stages=schedule.stages)
    forward_s, backward_s = _seconds(pace)
    share = schedule.ranks / schedule.stages
    half_s = backward_s * share / 2
    return Costs.uniform(
        stages=schedule.stages,
        forward_s=forward_s * share,
        backward_s=backward_s * share,
        input_grad_s=half_s if schedule.splits_backward else None,
        weight_grad_s=half_s if schedule.splits_backward else None,
    )


def _seconds(pace: Pace) -> tuple[float, float]:
    """Forward and backward of a whole rank; a backward is twice its forward if not given."""
    forward_s = _FORWARD_S if pace.forward_s is None else pace.forward_s
    backward_s = 2 * forward_s if pace.backward_s is None else pace.backward_s
    for flag, value_s in (("--forward-s", forward_s), ("--backward-s", backward_s)):
        if not 0 < value_s < 3600:
            raise ConfigError(f"{flag} is {value_s}: give seconds, more than 0 and under an hour")
    return forward_s, backward_s


def _in_words(pace: Pace, message_bytes: int) -> str:
    if pace.costs is not None:
        sleeps = f"what {pace.costs.name} says"
    else:
        forward_s, backward_s = _seconds(pace)
        sleeps = (
            f"{forward_s * 1e3:g} ms forward and {backward_s * 1e3:g} ms backward a rank and "
            "microbatch, a v-th of it a stage"
        )
    return (
        f"Every stage sleeps instead of computing: {sleeps}; messages of {message_bytes} bytes, "
        "processes and engine are real"
    )
