"""Which layers are of a kind, as Megatron-LM's flags have it: ([0]*3+[1]*58)."""

from __future__ import annotations

import ast

from fullbore.cost.model.shape import MOST_LAYERS
from fullbore.errors import ConfigError

__all__ = ["layer_pattern"]


def layer_pattern(flag: str, text: str) -> tuple[bool, ...]:
    """A sum of lists of 0 and 1, each times a number, computed without running it.

    flag: what a ConfigError names.
    """
    try:
        return tuple(bool(entry) for entry in _listed(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(
            f"{flag} {text[:60]}: it must be a number, or a list such as ([0]*3+[1]*58)"
        ) from None


def _listed(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=entries):
            return [_whole(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _listed(left) + _listed(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            repeated, times = _listed(left), _whole(right)
            if len(repeated) * times > MOST_LAYERS:
                raise ValueError("longer than any model")
            return repeated * times
        case _:
            raise ValueError("no list")


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("no number")
