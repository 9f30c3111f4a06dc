"""What torch.distributed.pipelining offers, by name: classes, methods, functions, parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch.distributed.pipelining as pipelining


def named_like(*words: str) -> str:
    """Whether the name of anything that the package exports has one of the words in it."""
    found = sorted({name for name in _names() if any(word in name.lower() for word in words)})
    if found:
        return f"its API has {', '.join(found)}"
    return f"left to the user: nothing in its API is named {' or '.join(words)}"


def _names() -> Iterator[str]:
    """Names exported, "Class.method" and "function(parameter)" among them."""
    for name in pipelining.__all__:
        thing = getattr(pipelining, name)
        yield name
        yield from _parameters(name, thing)
        if inspect.isclass(thing):
            for member, value in inspect.getmembers(thing, inspect.isfunction):
                if not member.startswith("_") and value.__module__.startswith(pipelining.__name__):
                    yield f"{name}.{member}"
                    yield from _parameters(f"{name}.{member}", value)


def _parameters(owner: str, thing: object) -> Iterator[str]:
    try:
        names = list(inspect.signature(thing).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    yield from (f"{owner}({name})" for name in names)
