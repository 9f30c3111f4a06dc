"""Starting the ranks of one machine with torchrun's own launcher, and hearing how they ended.

Each rank is a process, forked from a server that has imported what all of them need: eight ranks
on two cores would import torch four times one after the other. A rank that fails writes its error
to a file, so that the launcher can raise it as if it had happened here; signals are passed on, so
that Ctrl-C lets every rank save.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

from fullbore import errors
from fullbore.errors import FullboreError, PipelineError, RankError
from fullbore.runtime import DIED

__all__ = ["StopRequest", "end_with_parent", "launch_ranks"]

_GRACE_S = 5  # for ranks to end when another has failed: by themselves, and then again by SIGTERM
_ENDING = (signal.SIGTERM, signal.SIGHUP)
_SIGNALS = (signal.SIGINT, *_ENDING)


def launch_ranks(
    entry: Callable[..., None], *arguments: Any, ranks: int, imports: Sequence[str] = ()
) -> None:
    """Run entry(*arguments) in `ranks` processes, with torchrun's environment; wait for all.

    entry and arguments must be picklable. imports: modules that every rank will need. The server
    that imports them starts with a process's first call and stays, with that call's environment
    and imports; what a later one needs besides, each rank imports for itself.

    Raises the FullboreError of the rank that failed first, RankError where one died or failed
    otherwise, PipelineError where none could be started, KeyboardInterrupt where the ranks were
    stopped by a signal before they could react to it, or were there, or by a second one.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    multiprocessing.set_forkserver_preload([__name__, "torch._dynamo", "numba", *imports])
    with (
        tempfile.TemporaryDirectory(prefix="fullbore-") as folder,
        _Signals() as passed,
        _ranks_start_deaf(),
        _joined(passed),
    ):
        try:
            elastic_launch(_config(ranks), _run_rank)(folder, entry, arguments)
        except ChildFailedError as error:
            told = _told(Path(folder))  # every rank has ended: those that could, have told
            if passed.times and _is_of_a_stop(told, times=passed.times):
                raise KeyboardInterrupt from None
            raise _with_signal(told, error) if told is not None else _died(error) from None
        except (EOFError, ConnectionError) as error:  # of the server's pipe
            raise PipelineError(
                "the process that ranks are forked from ended before they were there: it was "
                "killed, or there was no memory for what it imports"
            ) from error


def _config(ranks: int) -> LaunchConfig:
    options: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": ranks,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "local_addr": "localhost",
        "max_restarts": 0,
        "start_method": "forkserver",
        # Not those that are passed on here; releases of torch differ in these fields.
        "signals_to_handle": "SIGQUIT",
        "shutdown_timeout": _GRACE_S,
    }
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in options.items() if name in known})


def _run_rank(folder: str, entry: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """What each process runs."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    over = threading.Event()
    end_with_parent(over)
    try:
        entry(*arguments)
        over.set()
    except FullboreError as error:
        _tell(Path(folder), error)
        sys.stdout.flush()
        os._exit(2)  # groups of a failed run would wait for each other in their destructors
    except KeyboardInterrupt:
        os._exit(130)  # torch would end with status 0, and the launcher wait for a value for ever


def end_with_parent(over: threading.Event | None = None) -> None:
    """From now on this process of `multiprocessing` ends when the one that started it does, however
    that ended: nobody waits for it any more.

    over: it is asked to stop first, by SIGTERM, and ends when this is set.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(
            target=_end_with, args=(parent, over), name="watches the parent", daemon=True
        ).start()


def _end_with(parent: BaseProcess, over: threading.Event | None) -> None:
    parent.join()
    if over is not None:
        os.kill(os.getpid(), signal.SIGTERM)
        over.wait()
    sys.stdout.flush()
    os._exit(0)


def _tell(folder: Path, error: FullboreError) -> None:
    temporary = folder / f".{os.getpid()}"
    state = error.state() if isinstance(error, RankError) else None
    told = {"kind": type(error).__name__, "text": str(error), "state": state}
    temporary.write_text(json.dumps(told, default=str), encoding="utf-8")
    temporary.rename(folder / f"{os.getpid()}.json")


def _told(folder: Path) -> FullboreError | None:
    """The error that was told first."""
    files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
    if not files:
        return None
    told = json.loads(files[0].read_text(encoding="utf-8"))
    if told["kind"] == "RankError":
        return RankError(**told["state"])
    kind: type[FullboreError] = getattr(errors, told["kind"], FullboreError)
    return kind(told["text"])


def _is_of_a_stop(told: FullboreError | None, *, times: int) -> bool:
    """Whether ranks that were asked to stop so often ended of that, and not of a failure.

    One that had no time to react is missed by the others, who then tell of it as of a failure.
    """
    if told is None or times > 1:
        return True
    return isinstance(told, RankError) and told.cause.startswith((DIED, KeyboardInterrupt.__name__))


def _with_signal(told: FullboreError, error: ChildFailedError) -> FullboreError:
    """What the living ranks told of a dead one, with what only its parent knows: the signal."""
    rank, failure = error.get_first_failure()
    if not isinstance(told, RankError) or told.rank != rank or failure.exitcode >= 0:
        return told
    cause = told.cause.replace(DIED, f"it was killed by {failure.signal_name()}")
    return RankError(**{**told.state(), "cause": cause})


def _died(error: ChildFailedError) -> RankError:
    """What is left to say where no rank told anything."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        cause = f"it was killed by {failure.signal_name()}"
    else:
        cause = f"it ended with status {failure.exitcode}: {failure.message}"
    return RankError(rank=rank, action=None, cause=cause)


class _Signals:
    """While entered: Ctrl-C and the like go to the ranks as SIGTERM, a second one as SIGKILL.

    times: how many there were so far.
    """

    def __init__(self) -> None:
        self.times = 0
        self._passed_to: set[int | None] = set()  # by process id, of the first one
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self, children: Iterable[BaseProcess]) -> None:
        """To those that were not there yet when it came."""
        for child in children:
            if self.times > 1:
                child.kill()
            elif self.times and child.pid not in self._passed_to:
                self._passed_to.add(child.pid)
                child.terminate()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.pass_on(multiprocessing.active_children())


@contextmanager
def _ranks_start_deaf() -> Iterator[None]:
    """Ranks that start meanwhile hear Ctrl-C once they have a `StopRequest`, and not before.

    A terminal sends it to them too, and in the middle of Python's start they would all print a
    traceback. What a thread blocks its new processes block; this process hears by another thread.
    The server that forks them never hears what ends a process: it ends with this process and them.
    """
    resource_tracker.ensure_running()  # which unblocks SIGINT, so not later
    over = threading.Event()
    threading.Thread(target=over.wait, name="hears signals", daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()


@contextmanager
def _joined(passed: _Signals) -> Iterator[None]:
    """How the launcher waits for ranks, again and again, meanwhile.

    Those that outlive another's failure have `_GRACE_S`, twice, before they are killed: torchrun's
    launcher would ask them to end at once and kill them after 30 s, and has no option. A signal
    that came before all of them were started reaches the others here.
    """
    join = ProcessContext.join

    def join_with_grace(self: ProcessContext, timeout: float | None = None) -> bool:
        passed.pass_on(self.processes)
        over: bool = join(self, timeout, grace_period=_GRACE_S)
        return over

    ProcessContext.join = join_with_grace  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProcessContext.join = join  # type: ignore[method-assign]


class StopRequest:
    """While entered: Ctrl-C, SIGTERM or SIGHUP asks to stop; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        """Whether a stop was asked for."""
        return self._asked

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._asked:
            raise KeyboardInterrupt
        self._asked = True
