"""From what was typed for `fullbore explain` to an explanation, with progress, on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fullbore.cli.explain_document import document
from fullbore.cli.explain_tables import report
from fullbore.cli.output import print_json
from fullbore.cli.plan_inputs import memory_limit
from fullbore.cost.hardware import Cluster
from fullbore.cost.model.script import read_flags
from fullbore.errors import ConfigError
from fullbore.plan.explain import explain

__all__ = ["Asked", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed; None where it was not."""

    megatron: str | None
    cluster: str | None
    memory_limit: str | None
    top: int
    as_json: bool


def run(asked: Asked) -> bool:
    """Explain, and print it; whether the job runs as it is. Raises ConfigError."""
    if asked.megatron is None or asked.cluster is None:
        given = {"--megatron": asked.megatron, "--cluster": asked.cluster}
        missing = " and ".join(flag for flag, value in given.items() if value is None)
        raise ConfigError(
            f"give {missing} too, such as --megatron train.sh --cluster h100:8x8 (or a TOML file)"
        )
    if asked.top < 1:
        raise ConfigError(f"--top {asked.top}: it must be 1 or more")
    source = sys.stdin.read() if asked.megatron == "-" else asked.megatron
    cluster = Cluster.parse(asked.cluster)
    with _progress() as tell:
        made = explain(
            read_flags(source),
            cluster,
            name=_name(asked.megatron),
            memory_limit_bytes=memory_limit(asked.memory_limit),
            top=asked.top,
            report=tell,
        )
    if asked.as_json:
        print_json(document(made))
    else:
        print(report(made))
    return made.runs


def _name(source: str) -> str:
    """The file's name without its ending; of a line of flags there is none."""
    path = Path(source[:200])
    return path.stem if path.suffix in (".sh", ".yaml", ".yml") else "megatron"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, and nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=30), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading flags", total=None)
        yield lambda done, of: bar.update(
            task, total=of, completed=done, description=f"{done} of {of} changes evaluated"
        )
