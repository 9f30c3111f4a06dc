"""What every launch file is made from, and what all of them have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fullbore.ir import Schedule, to_text
from fullbore.plan.choice import Choice
from fullbore.plan.question import Question
from fullbore.schedules import FAMILIES

__all__ = [
    "HERE",
    "SCHEDULE_FILE",
    "Job",
    "Launch",
    "LaunchFile",
    "array",
    "comment",
    "found_files",
    "save_interval",
    "slug",
    "torchrun",
]

SCHEDULE_FILE = "schedule.csv"

# The folder of a script, in its variable `here`.
HERE = 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n'

_BETWEEN_CHECKPOINTS_S = 1800.0
_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A plan to be written down.

    choice: with its layers. schedule: its computing actions. step_s: predicted. head: lines that
    say where a file came from. model: the folder or file that was planned for, None where it is
    none that Hugging Face reads. from_scratch: whether there are no weights beside it. folder:
    where the files go, as a launched job will find it.
    """

    question: Question
    choice: Choice
    schedule: Schedule
    step_s: float
    head: tuple[str, ...]
    model: str | None
    from_scratch: bool
    folder: str

    @property
    def is_found(self) -> bool:
        """Whether the schedule has no name, so that it travels as a file."""
        return all(family.name != self.choice.schedule for family in FAMILIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFile:
    """A file's name within the launch folder, and what it says."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What starts a plan's processes on one node: bash and the first of the files.

    needs: environment variables that the script reads, with what they are for. ranks: what the
    command line of a rank, and nothing else, matches (a regular expression), where a SIGTERM to a
    rank makes all of them save and leave; None where it does not.
    """

    files: tuple[LaunchFile, ...]
    needs: tuple[tuple[str, str], ...] = ()
    ranks: str | None = None

    @property
    def script(self) -> str:
        """The name of the file that is started."""
        return self.files[0].name


def comment(lines: tuple[str, ...], sign: str = "#") -> str:
    """Lines as a comment of a shell script, TOML or YAML."""
    return "".join(f"{sign} {line}".rstrip() + "\n" for line in lines)


def array(name: str, lines: list[str]) -> str:
    """A shell array of flags, one with its values a line."""
    told = "\n".join(f"  {line}" for line in lines)
    return f"{name}=(\n{told}\n)\n"


def torchrun(job: Job, program: str) -> str:
    """The command that starts the ranks of one node; several nodes meet on the one named HEAD."""
    cluster = job.question.cluster
    per_node = f"--nproc-per-node {cluster.device.gpus_per_node}"
    if cluster.nodes == 1:
        return f"exec torchrun --standalone {per_node} \\\n  {program}\n"
    meeting = (
        f'--rdzv-backend c10d --rdzv-id "${{JOB_ID:-plan}}" '
        f'--rdzv-endpoint "${{HEAD:?first node}}:${{PORT:-{_PORT}}}"'
    )
    return f"exec torchrun --nnodes {cluster.nodes} {per_node} \\\n  {meeting} \\\n  {program}\n"


def found_files(job: Job, *, needed: bool | None = None) -> tuple[LaunchFile, ...]:
    """The schedule as a file, where it has no name (or where it is needed all the same)."""
    if not (job.is_found if needed is None else needed):
        return ()
    return (LaunchFile(name=SCHEDULE_FILE, text=to_text(job.schedule).replace("\r\n", "\n")),)


def save_interval(job: Job) -> int:
    """Steps between checkpoints, for one every half hour or so."""
    return max(1, round(_BETWEEN_CHECKPOINTS_S / job.step_s))


def slug(job: Job, most: int = 40) -> str:
    """The model's name as Kubernetes and Slurm take names: a letter, letters, digits, dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", job.question.shape.name.lower())[:most].strip("-")
    return plain if re.match("[a-z]", plain) else f"plan-{plain}".strip("-")
