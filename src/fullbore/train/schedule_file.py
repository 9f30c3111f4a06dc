"""A schedule from a file instead of by name, as `fullbore search` and `plan` write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from fullbore.errors import ConfigError
from fullbore.ir import Schedule
from fullbore.passes import strip_communication
from fullbore.verify import check, check_runnable

__all__ = ["SAID_BY_FILES", "is_schedule_file", "read_schedule_file"]

# Settings that a schedule from a file leaves nothing to say about.
SAID_BY_FILES = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "microbatch_group_size_per_virtual_pipeline_stage",
)


def is_schedule_file(name: str | None) -> TypeGuard[str]:
    """Whether --schedule names a file."""
    return name is not None and name.lower().endswith(".csv")


def read_schedule_file(
    path: str, *, ranks: int, microbatches: int, typed: Mapping[str, int | None]
) -> Schedule:
    """The schedule in a CSV file, which must obey every law; compute actions only.

    ranks, microbatches: P and M of the run. typed: flags that a name would take, None where they
    were not given; a file says what they say. Raises NotationError, VerificationError or
    ScheduleError, and ConfigError where flags say another P, M or v.
    """
    schedule = Schedule.from_csv(path)
    check(schedule)
    check_runnable(schedule)
    if schedule.ranks != ranks:
        raise ConfigError(
            f"--schedule {path} is for P={schedule.ranks} ranks: set "
            f"--pipeline-model-parallel-size {schedule.ranks}, not {ranks}"
        )
    sequences = schedule.microbatches // schedule.slices
    if sequences != microbatches:
        raise ConfigError(
            f"--schedule {path} has M={sequences} microbatches and the run "
            f"{microbatches}: let --global-batch-size / --micro-batch-size / data-parallel size be "
            f"{sequences}"
        )
    for flag, value in typed.items():
        if value is not None:
            raise ConfigError(f"{flag} {value}: --schedule {path} says it already; leave it out")
    return strip_communication(schedule)
