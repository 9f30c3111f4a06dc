"""A configuration as it was read: keys looked up by name, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fullbore.errors import ModelError

__all__ = ["Config", "read_config"]

_SIZES = frozenset(
    ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
)
_LARGEST = 10**12  # what no number of a model comes near


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The keys of a Hugging Face `config.json`.

    names: what a key is called in this family where it is not called as usual; of sizes the usual
    name will do too, as it does for transformers. older: what it was called once, and may be still.
    """

    data: Mapping[str, object]
    names: Mapping[str, str]
    older: Mapping[str, str] = field(default_factory=dict)

    def called(self, name: str) -> str:
        """What the file calls a key."""
        older = self.older.get(name)
        if older is not None and older in self.data:
            return older
        own = self.names.get(name, name)
        return name if own not in self.data and name in _SIZES and name in self.data else own

    def has(self, name: str) -> bool:
        """Whether a key has a value."""
        return self.data.get(self.called(name)) is not None

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number. Raises ModelError naming the key where it is none, or too small."""
        key = self.called(name)
        value = self.data.get(key)
        value = default if value is None else value
        found = "is missing" if value is None else f"is {_shown(value)}"
        wanted = f"{key} {found} in the model's configuration: it must be a whole number, {least}"
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"{wanted} or more")
        if value > _LARGEST:
            raise ModelError(f"{wanted} to {_LARGEST:.0e}")
        return value

    def share(self, name: str, default: float) -> float:
        """A number from 0 to 1. Raises ModelError naming the key."""
        key = self.called(name)
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ModelError(f"{key} is {_shown(value)}: it must be a number from 0 to 1")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:  # noqa: FBT001 - as dict.get has it
        """A yes or no. Raises ModelError naming the key where it is neither."""
        key = self.called(name)
        value = self.data.get(key)
        if value is None:
            return default
        if value not in (True, False):  # 1 and 0 will do
            raise ModelError(f"{key} is {_shown(value)}: it must be true or false")
        return bool(value)

    def word(self, name: str, default: str) -> str:
        """A text. Raises ModelError naming the key where it is none."""
        key = self.called(name)
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise ModelError(f"{key} is {_shown(value)}: it must be a name")
        return value

    def items(self, name: str) -> tuple[object, ...] | None:
        """A list, or None where there is none. Raises ModelError naming the key."""
        key = self.called(name)
        value = self.data.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise ModelError(f"{key} is {_shown(value)}: it must be a list")
        return None if value is None else tuple(value)


def _shown(value: object) -> str:
    """A value as it was written, or its beginning."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_config(path: Path) -> dict[str, object]:
    """The configuration in a file, or in a folder's `config.json`.

    Raises ModelError where there is none, or it is not a JSON object.
    """
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"no file {file}: give a Hugging Face config.json, or a folder that has one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no text, or no JSON
        raise ModelError(f"cannot read {str(file)[:200]} as JSON: {error}"[:500]) from error
    if not isinstance(data, dict):
        raise ModelError(f"{file} holds no JSON object: a config.json is one")
    return data
