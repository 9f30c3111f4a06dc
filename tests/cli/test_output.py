"""Files that commands write are whole, or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fullbore.cli.output import write
from fullbore.errors import ConfigError


def test_a_write_that_fails_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    write(target, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"cannot write .*report.html: No space left on device"):
        write(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_links_and_devices_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    write(Path(os.devnull), "gone")
    assert not Path(os.devnull).is_file()
