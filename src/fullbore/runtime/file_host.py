"""Offloading on CPU: a file takes what leaves, and a thread of its own copies.

The file has no name from the moment it is made, so that nothing is left of it when its process
ends, in whatever way. It is written and read, not mapped: a disk that is full then raises an
error, where a mapped file would end the process.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from fullbore.errors import PipelineError
from fullbore.runtime.host import Mark, Pool, Storages, bytes_of, offsets_of

__all__ = ["FileHost", "try_folder"]

_JOIN_S = 10.0


class _Place:
    """A part of the file."""

    __slots__ = ("offset", "size")

    def __init__(self, offset: int, size: int) -> None:
        self.offset, self.size = offset, size


class _FileCopy:
    """A copy by the thread; an error in it is raised by whoever waits."""

    __slots__ = ("_done", "end", "error", "start", "storages")

    def __init__(self) -> None:
        self.start: Any = None
        self.end: Any = None
        self.storages: Storages = ()
        self._done = threading.Event()
        self.error: Exception | None = None

    def run(self, work: Callable[[], Storages], mark: Mark | None) -> None:
        """In the thread."""
        try:
            self.start = mark() if mark is not None else None
            self.storages = work()
            self.end = mark() if mark is not None else None
        except Exception as error:
            self.error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise PipelineError(
                f"copying activations to or from the host failed ({self.error}): "
                "offload_folder says where they go"
            ) from self.error


class _InFile:
    """What is in the file, in pieces one behind the other."""

    __slots__ = ("copy", "place", "sizes")

    def __init__(self, copy: _FileCopy, place: _Place, sizes: list[int]) -> None:
        self.copy, self.place, self.sizes = copy, place, sizes


_Job = Callable[[], None]


def _nameless_file(folder: Path | None) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, buffering=0)


def try_folder(folder: Path | None) -> None:
    """Raise PipelineError where no file can be made in a folder."""
    try:
        _nameless_file(folder).close()
    except OSError as error:
        raise PipelineError(
            f"offload_folder: no file can be made there ({error}): give a folder on a disk of "
            "this machine"
        ) from error


class FileHost:
    """A file without a name, and a thread that copies; both are made when first needed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._end = 0
        self._pool = Pool(self._grow, self._start_over)
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._file: IO[bytes] | None = None
        self._stop: Callable[[], object] = lambda: None

    def put(self, storages: Storages, mark: Mark | None) -> _InFile:
        """Begin to write; the storages are held until that is done."""
        sizes = [storage.nbytes() for storage in storages]
        offsets = offsets_of(sizes)
        place = self._pool.take(offsets[-1])
        number = self._opened().fileno()
        away = _InFile(_FileCopy(), place, sizes)
        starts = [place.offset + offset for offset in offsets]

        def write() -> Storages:
            for storage, start in zip(storages, starts, strict=False):
                _write(number, _memory(bytes_of(storage)), start)
            return ()

        self._do(away.copy, write, mark)
        return away

    def get(self, away: _InFile, mark: Mark | None) -> _FileCopy:
        """Begin to read into new storages, which are made when their turn comes."""
        number, first = self._opened().fileno(), away.place.offset
        starts = [first + offset for offset in offsets_of(away.sizes)]

        def read() -> Storages:
            if away.copy.error is not None:
                raise away.copy.error
            found = []
            for size, start in zip(away.sizes, starts, strict=False):
                tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
                _read(number, _memory(tensor), start)
                found.append(tensor.untyped_storage())
            return found

        copy = _FileCopy()
        self._do(copy, read, mark)
        self._pool.give_back(away.place)
        return copy

    def reset(self) -> None:
        """What is under way ends first, since copies keep their order."""
        self._pool.reset()

    def close(self) -> None:
        """The file is gone when the copy under way has ended."""
        self._stop()
        self._jobs = self._file = None
        self._pool.reset()

    def _grow(self, size: int) -> _Place:
        place = _Place(self._end, size)
        self._end += size
        return place

    def _start_over(self) -> None:
        self._end = 0

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = _nameless_file(self._folder)
            self._jobs = queue.SimpleQueue()
            thread = threading.Thread(
                target=_work, args=(self._jobs, self._file), name="fullbore-offload", daemon=True
            )
            thread.start()
            self._stop = weakref.finalize(self, _end, self._jobs, thread)
        return self._file

    def _do(self, copy: _FileCopy, work: Callable[[], Storages], mark: Mark | None) -> None:
        assert self._jobs is not None
        self._jobs.put(lambda: copy.run(work, mark))


def _work(jobs: queue.SimpleQueue[_Job | None], file: IO[bytes]) -> None:
    with file:
        while _do_one(jobs.get()):
            pass


def _do_one(job: _Job | None) -> bool:
    """What a job holds goes with this function's frame."""
    if job is not None:
        job()
    return job is not None


def _end(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        with suppress(RuntimeError):  # a process that ends may not join
            thread.join(timeout=_JOIN_S)


def _memory(tensor: torch.Tensor) -> memoryview:
    """Of a tensor of bytes."""
    array: Any = tensor.numpy()
    return memoryview(array)


def _write(number: int, data: memoryview, offset: int) -> None:
    """All of it: the system may take less at once."""
    while len(data):
        done = os.pwrite(number, data, offset)
        data, offset = data[done:], offset + done


def _read(number: int, data: memoryview, offset: int) -> None:
    while len(data):
        done = os.preadv(number, [data], offset)
        if done == 0:
            raise EOFError("the file is shorter than what was written into it")
        data, offset = data[done:], offset + done
