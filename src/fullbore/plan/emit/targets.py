"""What `--emit` writes: for engines their files, for schedulers a file around one of those."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fullbore.errors import ConfigError
from fullbore.plan.emit.deepspeed import deepspeed_launch
from fullbore.plan.emit.fullbore import fullbore_launch
from fullbore.plan.emit.job import Job, Launch, LaunchFile
from fullbore.plan.emit.kubernetes import kubernetes_manifest
from fullbore.plan.emit.megatron import megatron_launch
from fullbore.plan.emit.slurm import slurm_script
from fullbore.plan.emit.torchtitan import torchtitan_launch
from fullbore.plan.engines import Engine, engine_of

__all__ = ["TARGETS", "Targets", "launch_files"]

_ENGINES: Mapping[str, Callable[[Job], Launch]] = {
    "fullbore": fullbore_launch,
    "megatron": megatron_launch,
    "deepspeed": deepspeed_launch,
    "torchtitan": torchtitan_launch,
}
_SCHEDULERS: Mapping[str, Callable[[Job, Launch], LaunchFile]] = {
    "slurm": slurm_script,
    "k8s": kubernetes_manifest,
}

TARGETS = (*_ENGINES, *_SCHEDULERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """For whom launch files are written: engines, at least one where any, and schedulers.

    Schedulers start the first of the engines.
    """

    engines: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str | None) -> Targets:
        """Read `slurm,megatron`; ConfigError for a name that says nothing."""
        names = () if text is None else tuple(dict.fromkeys(text.split(",")))
        unknown = next((name for name in names if name not in TARGETS), None)
        if unknown is not None:
            raise ConfigError(
                f"--emit {text}: {unknown!r} is none of {', '.join(TARGETS)}; several are written "
                "as slurm,megatron"
            )
        engines = tuple(name for name in names if name in _ENGINES)
        return Targets(
            engines=engines or (("fullbore",) if names else ()),
            schedulers=tuple(name for name in names if name in _SCHEDULERS),
        )

    @property
    def able(self) -> tuple[Engine, ...]:
        """What a plan for them has to keep to."""
        return tuple(map(engine_of, self.engines))


def launch_files(targets: Targets, job: Job) -> tuple[LaunchFile, ...]:
    """Every file, each once. ConfigError names the target, the choice and what would do."""
    launches = [_ENGINES[name](job) for name in targets.engines]
    files = [file for launch in launches for file in launch.files]
    files += [_SCHEDULERS[name](job, launches[0]) for name in targets.schedulers]
    return tuple({file.name: file for file in files}.values())
