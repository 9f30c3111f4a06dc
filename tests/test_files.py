"""Files that are written are whole, or as they were."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fullbore.cli.output import write
from fullbore.cost import Costs
from fullbore.errors import ConfigError, CostsError
from fullbore.files import replace_file
from fullbore.schedules import gpipe

WRITERS: dict[str, tuple[Callable[[Path], None], type[Exception]]] = {
    "picture": (lambda path: write(path, "new"), ConfigError),
    "costs": (lambda path: Costs.uniform(stages=1).save(path), CostsError),
    "schedule": (lambda path: gpipe(ranks=1, microbatches=1).to_csv(path), OSError),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_write_that_fails_leaves_the_older_file(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, error = WRITERS[what]
    target = tmp_path / "file"
    replace_file(target, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(error, match="No space left on device"):
        writer(target)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_links_and_devices_are_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    replace_file(os.devnull, b"gone")
    assert not Path(os.devnull).is_file()
