"""How several workers share the tests: in the order in which they are collected, file by file.

pytest-xdist by itself begins with the files of most tests, so that one with two that take minutes
comes last, and the other workers wait for it.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

__all__ = ["InOrder"]


class InOrder(LoadScopeScheduling):
    """A worker takes the next run of tests of one file: its quick ones, or later its slow ones."""

    def schedule(self) -> None:
        if self.collection is None:
            self.config.option.loadscopereorder = False
            self._runs = _runs(next(iter(self.registered_collections.values())))
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._runs[nodeid]


def _runs(names: list[str]) -> dict[str, str]:
    """By test, the run of neighbours of one file that it belongs to."""
    found: dict[str, str] = {}
    file, number = "", 0
    for name in names:
        if name.split("::")[0] != file:
            file, number = name.split("::")[0], number + 1
        found[name] = f"{number}: {file}"
    return found
