"""What all tests share: quick ones first, and a browser, or the true reason for having none."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_SLOW_S = 5.0  # what a slow test takes that does not say

# Machines differ in speed; pytest-timeout bounds a test that hangs.
settings.register_profile("fullbore", deadline=None, print_blob=True)
settings.load_profile("fullbore")


def pytest_configure() -> None:
    """Let Ctrl-C work in what tests start, also where a shell put them in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick tests before the slow ones, and of these the files first that take longest."""
    slow_s: dict[str, float] = {}
    for item in items:
        mark = item.get_closest_marker("slow")
        if mark is not None:
            seconds = mark.args[0] if mark.args else _SLOW_S
            slow_s[_file(item)] = slow_s.get(_file(item), 0.0) + seconds

    def place(item: pytest.Item) -> tuple[float, str]:
        is_slow = item.get_closest_marker("slow") is not None
        return (-slow_s[_file(item)], _file(item)) if is_slow else (-float("inf"), "")

    items.sort(key=place)


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Several workers keep that order."""
    from sharing import InOrder

    return InOrder(config, log)


@pytest.fixture(scope="session")
def browser_path() -> str:
    """The path of a Chromium. Without one the test skips; in CI (CI=true) it fails."""
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        reason = f"no browser: none of {', '.join(_BROWSERS)} is on the PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny language model, `model`, and text for it, `text.jsonl`."""
    from tiny_text import write_model, write_text  # imports torch, which most tests do without

    made = tmp_path_factory.mktemp("tiny")
    write_model(made / "model")
    write_text(made / "text.jsonl")
    return made
