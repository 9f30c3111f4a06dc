"""Files that are whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import os
import shutil
from os import PathLike
from pathlib import Path

__all__ = ["move_folder", "replace_file"]


def move_folder(made: Path, target: Path) -> None:
    """Move a finished folder into its place; if somebody else was faster, theirs stays."""
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(made)


def replace_file(path: str | PathLike[str], data: bytes) -> None:
    """Write a file so that a reader, a crash or a full disk leaves the old one or the new, whole.

    A link stays one; what is no file, such as /dev/stdout, is written to. OSError as it comes.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
