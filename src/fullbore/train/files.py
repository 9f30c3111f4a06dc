"""Files that are whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["move_folder", "replace_text"]


def move_folder(made: Path, target: Path) -> None:
    """Move a finished folder into its place; if somebody else was faster, theirs stays."""
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(made)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a crash, sees the old text or the new, never half."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
