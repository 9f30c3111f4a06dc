"""A configuration as it was read: keys looked up by name, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fullbore.errors import ModelError

__all__ = ["Config", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The keys of a Hugging Face `config.json`.

    names: what a key is called in this family where it is not called as usual.
    """

    data: Mapping[str, object]
    names: Mapping[str, str]

    def called(self, name: str) -> str:
        """What the file calls a key."""
        return self.names.get(name, name)

    def has(self, name: str) -> bool:
        """Whether a key has a value."""
        return self.data.get(self.called(name)) is not None

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number. Raises ModelError naming the key where it is none, or too small."""
        key = self.called(name)
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            found = "is missing" if value is None else f"is {value!r}"
            raise ModelError(
                f"{key} {found} in the model's configuration: it must be {least} or more"
            )
        return value

    def share(self, name: str, default: float) -> float:
        """A number from 0 to 1. Raises ModelError naming the key."""
        key = self.called(name)
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ModelError(f"{key} is {value!r}: it must be a number from 0 to 1")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:  # noqa: FBT001 - as dict.get has it
        """A yes or no."""
        value = self.data.get(self.called(name))
        return default if value is None else bool(value)

    def word(self, name: str, default: str) -> str:
        """A text. Raises ModelError naming the key where it is none."""
        value = self.data.get(self.called(name), default)
        if not isinstance(value, str):
            raise ModelError(f"{self.called(name)} is {value!r}: it must be a name")
        return value

    def items(self, name: str) -> tuple[object, ...] | None:
        """A list, or None where there is none."""
        value = self.data.get(self.called(name))
        return tuple(value) if isinstance(value, list | tuple) else None


def read_config(path: Path) -> dict[str, object]:
    """The configuration in a file, or in a folder's `config.json`.

    Raises ModelError where there is none, or it is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"no file {file}: give a Hugging Face config.json, or a folder that has one"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot read {file} as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{file} holds no JSON object: a config.json is one")
    return data
