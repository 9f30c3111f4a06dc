"""Runs the command line in this process and catches what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fullbore.cli.main import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a command left: its exit status, stdout and stderr."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as JSON."""
        return json.loads(self.out)


@pytest.fixture
def fullbore(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Call as `fullbore("show", "gpipe", "-p", 4)`."""

    def run(*arguments: object) -> Ran:
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Ran(status=int(left.value.code or 0), out=said.out, err=said.err)

    return run
