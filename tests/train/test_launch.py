"""How the ranks' ends are told: what a signal ended is no failure of a rank."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from fullbore.errors import DataError, FullboreError, RankError
from fullbore.runtime import DIED
from fullbore.train.launch import launch_ranks

_PATIENCE_S = 50.0

pytestmark = pytest.mark.slow


def _tells(folder: Path, error: FullboreError) -> None:
    """A rank that does not end by SIGTERM, and tells of something once the test wants it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "ready").touch()
    _wait_for(folder / "struck")
    raise error


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not path.exists() and time.monotonic() < deadline_s:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("told", "raised"),
    [
        (RankError(rank=0, action="0F0", cause="KeyboardInterrupt: "), KeyboardInterrupt),
        (RankError(rank=0, action=None, cause=DIED), KeyboardInterrupt),
        (RankError(rank=0, action="0F0", cause="ValueError: no"), RankError),
        (DataError("no text"), DataError),
    ],
    ids=["interrupted", "gone", "failed", "no data"],
)
def test_ranks_that_miss_one_after_a_signal_do_not_call_it_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: FullboreError,
    raised: type[BaseException],
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])  # a rank imports its entry from here

    def strike() -> None:
        _wait_for(tmp_path / "ready")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # the launcher hears it in its main thread
        (tmp_path / "struck").touch()

    threading.Thread(target=strike).start()
    with pytest.raises(raised):
        launch_ranks(_tells, tmp_path, told, ranks=1)


def _large_pages() -> Path:
    return Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _counts_pages(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(128 * 2**20, dtype=torch.uint8).fill_(1)
    given = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    (folder / "pages").write_text(str(given))


@pytest.mark.skipif(
    not _large_pages().exists() or "[never]" in _large_pages().read_text(),
    reason="this kernel has no large pages for programs that want them",
)
def test_large_tensors_of_a_rank_come_in_large_pages(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from tests.train.test_launch import _counts_pages; from fullbore.train.launch import *\n"
        "launch_ranks(_counts_pages, Path(sys.argv[2]), ranks=1)"
    )
    root = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", code, root, str(tmp_path)], check=True, timeout=55)
    assert int((tmp_path / "pages").read_text()) < 128 * 2**20 / resource.getpagesize() / 10
