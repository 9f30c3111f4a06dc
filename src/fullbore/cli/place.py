"""Where torchrun put this process: the one place that reads its environment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.train.place import RankPlace

__all__ = ["is_under_torchrun", "place_here", "processes"]


def is_under_torchrun() -> bool:
    """Whether this process is one of several that a launcher started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def processes() -> int:
    """How many processes torchrun has started, 1 without it; ConfigError if it says no number."""
    try:
        return int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ConfigError(f"torchrun's environment is broken: {error}") from error


def place_here() -> RankPlace:
    """Where torchrun put this process; alone without it. ConfigError where it cannot be read."""
    from fullbore.train.place import RankPlace

    names = {
        "rank": "RANK",
        "size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_size": "LOCAL_WORLD_SIZE",
    }
    try:
        found = {
            field: int(os.environ[name]) for field, name in names.items() if name in os.environ
        }
    except ValueError as error:
        raise ConfigError(f"torchrun's environment is broken: {error}") from error
    return RankPlace(**found)
