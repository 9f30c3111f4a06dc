"""A rule that flags break: which one, in words, and the flags that could be changed."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Broken"]

_FLAG = re.compile(r"--[a-z][a-z0-9-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """message: what is wrong, naming flags. also: further flags (with underscores) that matter.
    is_ours: whether Megatron-LM would run it, and there is only no price for it here.
    """

    rule: str
    message: str
    also: tuple[str, ...] = ()
    is_ours: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """What may be changed, with underscores, in the order in which it is named."""
        named = (match[2:].replace("-", "_") for match in _FLAG.findall(self.message))
        return tuple(dict.fromkeys((*named, *self.also)))

    @property
    def key(self) -> tuple[object, ...]:
        """The same for other numbers of the same flags."""
        return self.rule, self.flags
