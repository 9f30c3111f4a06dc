"""What all tests share: quick ones first, and a browser, or the true reason for having none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Machines differ in speed; pytest-timeout bounds a test that hangs.
settings.register_profile("fullbore", deadline=None, print_blob=True)
settings.load_profile("fullbore")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick tests before the slow ones, each in their own order."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


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
