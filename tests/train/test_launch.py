"""How the ranks' ends are told: what a signal ended is no failure of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

import ranks

from fullbore.errors import DataError, FullboreError, PipelineError, RankError
from fullbore.runtime import DIED
from fullbore.train import launch
from fullbore.train.launch import launch_ranks

_PATIENCE_S = 50.0
_PARENT = """
import multiprocessing, time
from fullbore.train.launch import end_with_parent

def child():
    end_with_parent()
    time.sleep(60)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
print(process.pid, flush=True)
process.join()
"""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _the_server_of_all_tests() -> None:
    """The launcher would start one of its own, and later tests would have that one."""
    ranks.start_server()


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


def _dies_or_hangs(folder: Path) -> None:
    """Rank 1 dies; the other one is deaf, as one that waits in torch is, until it is killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "1":
        _wait_for(folder / "0")
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / "0").touch()
    time.sleep(_PATIENCE_S)


def test_a_rank_that_does_not_notice_anothers_death_is_killed_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    with pytest.raises(RankError, match="rank 1 failed: it was killed by SIGKILL"):
        launch_ranks(_dies_or_hangs, tmp_path, ranks=2)
    died_s = (tmp_path / "0").stat().st_mtime
    assert 5 < time.time() - died_s < 25, "torch alone takes 30 s"


def test_a_process_ends_with_the_one_that_started_it() -> None:
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    try:
        child.wait(timeout=10)
    finally:
        if child.is_running():
            child.kill()


def test_a_signal_before_any_rank_is_there_reaches_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    config = launch._config

    def struck(ranks: int) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return config(ranks)

    monkeypatch.setattr(launch, "_config", struck)
    with pytest.raises(KeyboardInterrupt):
        launch_ranks(_stays, tmp_path, ranks=2)  # else it would wait for them, and raise nothing
    begun = [int(path.name) for path in tmp_path.iterdir()]  # before it reached them
    assert not any(map(psutil.pid_exists, begun))


def _stays(folder: Path) -> None:
    """A rank that would have to be waited for."""
    (folder / str(os.getpid())).touch()
    time.sleep(_PATIENCE_S)


def test_a_server_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise EOFError

    monkeypatch.setattr(launch, "elastic_launch", lambda *_: gone)
    with pytest.raises(PipelineError, match="ended before they were there"):
        launch_ranks(_stays, ranks=2)
