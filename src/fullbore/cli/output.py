"""Where results go: JSON on stdout, tables on the terminal, bytes in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console, RenderableType

__all__ = ["console", "print_json", "table", "to_json", "write"]


def to_json(document: Mapping[str, object] | Sequence[object]) -> str:
    """JSON for people and programs: indented, keys in a fixed order, numbers unrounded."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_json(document: Mapping[str, object] | Sequence[object]) -> None:
    """Print a JSON document to stdout."""
    print(to_json(document), end="")


def write(path: Path, content: str | bytes) -> None:
    """Write a file, replacing an older one; ConfigError where that is not possible."""
    data = content.encode() if isinstance(content, str) else content
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def console() -> Console:
    """The terminal; colours only where it is one."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1
) -> RenderableType:
    """A plain table; the first `left` columns are text, the others numbers, set to the right."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        drawn.add_column(column, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    return drawn
