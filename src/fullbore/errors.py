"""Every error that Fullbore raises on purpose, drawn as a tree.

    FullboreError
    ├── NotationError     an action or a schedule that does not parse (names line and column)
    ├── ScheduleError     P, v, M or G break a rule (names the nearest legal values)
    ├── VerificationError a schedule breaks a law (carries the violations)
    ├── CostsError        a costs file that is not one (names the key)
    ├── ConfigError       flags or a configuration file that contradict each other
    ├── ModelError        a model that cannot be read, or cannot be cut into stages
    ├── DataError         training text that cannot be read
    ├── CheckpointError   a checkpoint that cannot be written or read
    └── PipelineError     a step failed at run time
        └── RankError     ... on a named rank, in a named action

Each message says what is wrong and what to do about it. The command line prints it without
a traceback and exits with status 2 (1 where a check was asked for and failed).
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself takes longer to import than the rest together
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CostsError",
    "DataError",
    "FullboreError",
    "ModelError",
    "NotationError",
    "PipelineError",
    "RankError",
    "ScheduleError",
    "VerificationError",
]


class FullboreError(Exception):
    """The root: catch this to catch everything that Fullbore raises on purpose."""


class NotationError(FullboreError):
    """Text that is not an action or a schedule in PyTorch's notation."""


class ScheduleError(FullboreError):
    """No schedule exists for these P, v, M and G; the message names the nearest legal values."""


class VerificationError(FullboreError):
    """A schedule breaks a law; the message lists the violations, one a line."""


class CostsError(FullboreError):
    """A costs file with an unknown, missing or impossible value."""


class ConfigError(FullboreError):
    """Flags or configuration values that are wrong by themselves or together."""


class ModelError(FullboreError):
    """A model that cannot be read, or whose structure cannot be cut into stages."""


class DataError(FullboreError):
    """Training text that cannot be read, or is too short for one batch."""


class CheckpointError(FullboreError):
    """A checkpoint that cannot be written, found or read."""


class PipelineError(FullboreError):
    """A pipeline step that could not be carried out."""


class RankError(PipelineError):
    """A step that failed because of one rank.

    `rank` is the number of the rank where the failure began (its pipeline rank; with a mesh, its
    rank in the default group) and `action` what it was doing (both None where nobody could tell);
    `cause` is the original error as text. `step` is the number of the step in hand, from 1 (where
    `evaluating`: of the step that comes next). `story` has one line a rank about what each was
    doing, and says where the flight records lie; `reporter` is the rank that composed it for all.
    """

    def __init__(
        self,
        *,
        rank: int | None,
        action: str | None,
        cause: str,
        step: int | None = None,
        evaluating: bool = False,
        story: Sequence[str] = (),
        reporter: int | None = None,
    ) -> None:
        self.rank, self.action, self.cause = rank, action, cause
        self.step, self.evaluating, self.story = step, evaluating, tuple(story)
        self.reporter = reporter
        who = "a rank" if rank is None else f"rank {rank}"
        when = None if step is None else f"step {step}"
        if when and evaluating:
            when = f"an evaluation before {when}"
        where = " of ".join(part for part in (action, when) if part)
        doing = f" in {where}" if where else ""
        super().__init__("\n".join([f"{who} failed{doing}: {cause}", *self.story]))

    def state(self) -> dict[str, Any]:
        """What makes the same error again: RankError(**state)."""
        told = ("rank", "action", "cause", "step", "evaluating", "story", "reporter")
        return {name: getattr(self, name) for name in told}

    def __reduce__(self) -> tuple[object, ...]:
        return _rank_error, (self.state(),)


def _rank_error(state: dict[str, Any]) -> RankError:
    return RankError(**state)
