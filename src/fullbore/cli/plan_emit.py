"""A plan as launch files on disk: where they came from, what they start, and who may run them."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from fullbore import __version__
from fullbore.cli.figures import percent, seconds
from fullbore.cli.output import write
from fullbore.cli.plan_tables import headline
from fullbore.cost.hardware import GIB
from fullbore.errors import ConfigError
from fullbore.plan.emit import Job, Targets, launch_files
from fullbore.plan.findings import Findings

__all__ = ["Emission", "typed_command"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """For whom launch files are written, and into which folder.

    model: what was planned for, as it was typed. command: all that was typed.
    """

    targets: Targets
    folder: Path
    model: str | None
    command: str

    def write(self, findings: Findings) -> list[Path]:
        """Write the best plan's launch files; their paths. Raises ConfigError."""
        if not self.targets.engines:
            return []
        files = launch_files(self.targets, self._job(findings))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.folder}: {error.strerror or error}") from error
        paths = [self.folder / file.name for file in files]
        for path, file in zip(paths, files, strict=True):
            write(path, file.text)
        return paths

    def _job(self, findings: Findings) -> Job:
        choice, folder = findings.winner.choice, self._model_folder()
        return Job(
            question=findings.plan.question,
            choice=choice,
            schedule=findings.plan.evaluator.programs.of(choice).schedule,
            step_s=findings.winner.step_s,
            head=tuple(_head(findings, self.command)),
            model=None if folder is None else str(folder),
            from_scratch=folder is not None and not _has_weights(folder),
            folder=self.folder.as_posix(),
        )

    def _model_folder(self) -> Path | None:
        """The folder for `fullbore train --model`; None where Megatron's flags were given."""
        path = Path(self.model or "")
        if path.is_dir():
            return path
        return path.parent if path.name == "config.json" else None


def _has_weights(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in _WEIGHTS)


def _head(findings: Findings, command: str) -> Iterator[str]:
    """Where a file came from, and what the plan promises."""
    winner, figures = findings.winner, findings.figures[0]
    yield f"Written by fullbore plan, version {__version__}:"
    yield from _continued(command)
    yield from textwrap.wrap(headline(findings.plan.question), _WIDTH)
    yield (
        f"Predicted: {seconds(winner.step_s)} a step, {percent(figures.mfu)} MFU, "
        f"{winner.peak_bytes / GIB:.1f} GiB on the fullest device."
    )


def _continued(command: str) -> list[str]:
    """A command over as many lines as it takes, as a shell reads it."""
    lines = textwrap.wrap(
        command,
        _WIDTH - 2,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def typed_command(context: typer.Context) -> str:
    """The command as it could be typed again: every option that was given, in the help's order."""
    words = ["fullbore", "plan"]
    for parameter in context.command.get_params(context):
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        value = context.params.get(name)
        if source is None or source.name != "COMMANDLINE" or value is None:
            continue
        words += _words(parameter.opts, parameter.secondary_opts, value)
    return shlex.join(words)


def _words(flags: list[str], negative: list[str], value: object) -> list[str]:
    """One option as it is typed, by its longest name."""
    if isinstance(value, bool):
        return [_longest(flags if value else negative)]
    return [_longest(flags), str(value)]


def _longest(flags: list[str]) -> str:
    return max(flags, key=len)
