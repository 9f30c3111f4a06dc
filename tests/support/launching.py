"""Launch scripts run as they are, with stand-ins for torchrun and Slurm on the PATH."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from fullbore.plan.emit import LaunchFile

__all__ = ["install", "started_with", "write_files"]


def write_files(folder: Path, files: Iterable[LaunchFile]) -> Path:
    """Write launch files into a folder."""
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / file.name).write_text(file.text, encoding="utf-8")
    return folder


def install(folder: Path, name: str, body: str) -> Path:
    """A command of this name in a folder `bin`, which is given back."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    program = programs / name
    program.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    program.chmod(0o755)
    return programs


def environment(programs: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment, with those programs before all others."""
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **(more or {})}


def started_with(script: Path, *arguments: str, env: Mapping[str, str] | None = None) -> list[str]:
    """What a script starts torchrun with, word by word."""
    programs = install(script.parent.parent, "torchrun", 'printf "%s\\n" "$@"')
    ran = subprocess.run(
        ["bash", str(script), *arguments],
        env=environment(programs, env),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()
