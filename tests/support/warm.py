"""Runs `python -m fullbore` in a process that has imported torch and transformers already.

A cold start takes twelve seconds of a core before anything happens: the command imports torch, and
the server of its ranks imports it again, with transformers. Here both are forked from what has
them: the command from the server of `ranks`, and its own server from the command. Beyond that all
is as in a cold start: the command has a session, a server and a resource tracker of its own, its
environment, signal handlers and streams are those of a fresh interpreter, and it runs as __main__.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction, resource_tracker, util
from typing import Any, TextIO

import ranks

__all__ = ["WarmCommand"]


class WarmCommand:
    """A command of fullbore that runs; with the part of subprocess.Popen that tests use."""

    def __init__(
        self, arguments: Sequence[str], *, env: Mapping[str, str], joined: bool = False
    ) -> None:
        """joined: stderr goes into stdout."""
        self.args = ["fullbore", *arguments]
        self.stdout, out = _pipe()
        self.stderr, err = (None, out) if joined else _pipe()
        self._process: Any = ranks.context.Process(
            target=_run, args=(list(arguments), dict(env), _Stream(out), _Stream(err))
        )
        self._process.start()
        for end in {out, err}:
            os.close(end)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """All that it says until nobody can say more, on stdout and stderr."""
        until_s = time.monotonic() + timeout
        said = ["", ""]

        def read(place: int, stream: TextIO) -> None:
            said[place] = stream.read()

        readers = [
            threading.Thread(target=read, args=(place, stream), daemon=True)
            for place, stream in enumerate((self.stdout, self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(0.0, until_s - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(max(0.0, until_s - time.monotonic()))
        return said[0], said[1]


def _pipe() -> tuple[TextIO, int]:
    reader, writer = os.pipe()
    return open(reader, encoding="utf-8"), writer


class _Stream:
    """A descriptor that is handed on to the process which is being started."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(handed: Any) -> int:
    return int(handed.detach())


# -- in the process of the command -----------------------------------------------------------------


def _run(arguments: list[str], env: dict[str, str], out: int, err: int) -> None:
    """What that process does, from a fresh interpreter's state on."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for copy in {out, err}:
        os.close(copy)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1)
    forkserver._forkserver.__init__()  # type: ignore[misc]  # not the one that forked this
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    util.spawnv_passfds = _spawn  # type: ignore[attr-defined]
    sys.argv = ["fullbore", *arguments]
    runpy.run_module("fullbore", run_name="__main__", alter_sys=True)


_cold_spawn: Any = util.spawnv_passfds  # type: ignore[attr-defined]


def _spawn(path: Any, arguments: list[Any], passed: Sequence[int]) -> int:
    """Start what multiprocessing starts; but the server of the ranks by a fork of this process."""
    code = arguments[-1]
    if not str(code).startswith("from multiprocessing.forkserver import main"):
        return int(_cold_spawn(path, arguments, passed))
    pid = os.fork()
    if pid:
        return pid
    try:
        _silence_all_but({0, 1, 2, *passed})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        exec(code, {})
    finally:
        os._exit(0)


def _silence_all_but(kept: set[int]) -> None:
    """What this process has inherited leads nowhere; not closed, since the objects that own the
    numbers would close them again when others have them.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept | {nowhere}:
            os.dup2(nowhere, descriptor)
