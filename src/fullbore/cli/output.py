"""Where results go: JSON on stdout, tables on the terminal, bytes in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fullbore.errors import ConfigError
from fullbore.files import replace_file

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["check_place", "console", "print_json", "table", "to_json", "write"]

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def to_json(document: Mapping[str, object] | Sequence[object]) -> str:
    """JSON for people and programs: one key or entry a line, numbers unrounded."""
    if isinstance(document, Mapping):
        lines = [f"{_encode(key)}: {_value(value)}" for key, value in document.items()]
        return _wrap("{", lines, "}", indent=2) + "\n"
    return _value(document, indent=2) + "\n"


def _value(value: object, *, indent: int = 4) -> str:
    """A list of objects with one of them a line; everything else on one line."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return _wrap("[", [_encode(entry) for entry in value], "]", indent=indent)
    return _encode(value)


def _wrap(opening: str, lines: list[str], closing: str, *, indent: int) -> str:
    inner = (",\n" + " " * indent).join(lines)
    return f"{opening}\n{' ' * indent}{inner}\n{' ' * (indent - 2)}{closing}"


def print_json(document: Mapping[str, object] | Sequence[object]) -> None:
    """Print a JSON document to stdout."""
    print(to_json(document), end="")


def check_place(*paths: Path | None) -> None:
    """ConfigError where a file cannot be written, before long work is done for it."""
    for path in paths:
        if path is None or path.is_file():
            continue
        folder = path.resolve().parent
        if path.is_dir():
            raise ConfigError(f"cannot write {path}: it is a folder; give the name of a file")
        if not folder.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {folder}; make it first")


def write(path: Path, content: str | bytes) -> None:
    """Write a file; ConfigError where that is not possible, with an older one as it was.

    What UTF-8 cannot hold, such as a file name in another encoding, becomes a question mark.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        replace_file(path, data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def console() -> Console:
    """The terminal; colours only where it is one."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table: the first column to the left, the others, numbers, to the right."""
    cells = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
