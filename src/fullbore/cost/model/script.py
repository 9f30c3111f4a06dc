"""Megatron flags wherever people keep them: a shell script, one line of arguments, a YAML file.

A script is not run. Its assignments, arrays and `${NAME}`, `${NAME:-default}` and `$((A * B))`
are understood, as launch scripts use them; everything that looks like `--flag value` is taken,
inside an `if` too. Of a flag that comes twice the last holds.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from fullbore.errors import ConfigError

__all__ = ["Flags", "read_flags"]

# A flag's name with underscores, and its words: none for a switch.
Flags = dict[str, tuple[str, ...]]

_ASSIGNMENT = re.compile(r"(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_USE = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\{(?P<braced>\w+)(?:\[[@*]\])?(?::?[-=](?P<default>[^}]*))?\}"
    r"|\$(?P<bare>[A-Za-z_]\w*)"
)
_ARRAY = re.compile(r"\b[A-Za-z_]\w*\+?=\((?!\()")
_NEGATIVE = re.compile(r"-\d")
_OPERATOR = re.compile(r"\|\|?|&&?|;|\d*[<>].*|&>.*")  # of the shell: 2>&1 | tee log


def read_flags(source: str) -> Flags:
    """The flags in a file (`.yaml`, `.yml`, or any script), or else in the text itself.

    Raises ConfigError where there are none, or a file cannot be read.
    """
    flags = _from_file(Path(source)) if _is_file(source) else flags_of(source)
    if not flags:
        raise ConfigError(
            f"no --flag is in {source[:60]!r}: give Megatron's arguments in quotes, or a .sh or "
            ".yaml file that exists"
        )
    return flags


def _is_file(source: str) -> bool:
    try:
        return Path(source).is_file()
    except OSError:  # a long line of arguments is no name
        return False


def _from_file(path: Path) -> Flags:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return _from_yaml(text, path) if path.suffix in (".yaml", ".yml") else flags_of(text)


def flags_of(text: str) -> Flags:
    """The flags in a script or in a line of arguments."""
    joined = re.sub(r"\\\r?\n", " ", text)
    values = _assigned(joined)
    flags: Flags = {}
    name = None
    for word in _words(_ARRAY.sub(" ", _substituted(joined, values))):
        if word.startswith("--") and len(word) > 2:
            key, _, value = word[2:].rstrip(");").partition("=")
            name = key.strip("\"'").replace("-", "_")  # a quote may be left of an odd number
            flags[name] = (value,) if value else ()
        elif name is not None and _is_value(word):
            flags[name] = (*flags[name], word)
        else:
            name = None
        if word.endswith((")", ");")) and "(" not in word:
            name = None  # the array ends here
    return {key: tuple(_cleaned(words)) for key, words in flags.items()}


def _is_value(word: str) -> bool:
    """Whether a word can belong to the flag before it; programs and pipes do not."""
    if word.endswith(".py") or _OPERATOR.fullmatch(word):
        return False
    return not word.startswith("-") or _NEGATIVE.match(word) is not None


def _words(text: str) -> Iterable[str]:
    """Words of a script, line by line, so that an odd quote spoils one line only."""
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = line.split()
        for word in words:
            # Quotes that hold several flags, as in ARGS="--a 1 --b 2".
            yield from word.split() if " " in word and "--" in word else (word,)
        yield "-"  # what follows on another line is no value of this line's last flag


def _cleaned(words: tuple[str, ...]) -> Iterable[str]:
    for word in words:
        cleaned = word.strip("\"'")
        if cleaned.startswith("("):
            yield cleaned  # a window or a pattern of layers
        elif cleaned := cleaned.rstrip(");"):
            yield cleaned


def _assigned(text: str) -> dict[str, str]:
    """Variables of a script; what is assigned twice has its last value, appended ones both."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        match = _ASSIGNMENT.match(line.strip())
        if match is None or match[3].startswith("("):
            continue
        value = _first_word(match[3])
        before = values.get(match[1], "") + " " if match[2] else ""
        values[match[1]] = _substituted(before + value, values)
    return values


def _first_word(text: str) -> str:
    if text.startswith("$(("):
        return text.partition("))")[0] + "))"
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return text
    return words[0] if words else ""


def _substituted(text: str, values: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return _computed(match["sum"], values)
        name = match["braced"] or match["bare"]
        return values.get(name) or match["default"] or ""

    return _USE.sub(value, text)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _computed(text: str, values: Mapping[str, str]) -> str:
    """`$((A * B))`, with variables with or without a dollar; empty where it is no sum."""
    named = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", lambda m: values.get(m[1], "0") or "0", text)
    try:
        tree = ast.parse(named.strip().replace("/", "//"), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return ""


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no sum of whole numbers")


def _from_yaml(text: str, path: Path) -> Flags:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"reading {path} needs PyYAML: pip install pyyaml, or give the flags as a line or .sh"
        ) from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read {path} as YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no mapping of flags to values")
    return dict(_flattened(data))


def _flattened(data: Mapping[object, object]) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Flags of a mapping and of the sections in it; a switch that is off is left out."""
    for key, value in data.items():
        name = str(key).lstrip("-").replace("-", "_")
        if isinstance(value, dict):
            yield from _flattened(value)
        elif isinstance(value, list):
            yield name, tuple(map(str, value))
        elif value is True:
            yield name, ()
        elif value is False and name == "add_bias_linear":
            yield "disable_bias_linear", ()  # as the flag is called that leaves it out
        elif value is not None and value is not False:
            yield name, (str(value),)
