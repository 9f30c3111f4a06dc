"""Reading of checkpoints that trusts no disk: a tensor is taken only if its bytes are as written.

Torch writes each tensor as a zip archive with a check sum, and its own reader does not look at
that sum: a bit that flipped, or a block of zeros that a crash has left, would become a weight.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

__all__ = ["CheckedReader"]


class CheckedReader(FileSystemReader):
    """A reader that raises OSError where what it is to read is not what was written.

    Costs a second reading of this rank's tensors, from memory mostly, and their sums: about a
    second a gigabyte.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As FileSystemReader's, once everything has been checked."""
        places = (self.storage_data[item.storage_index] for item in plan.items)
        for name, offset, length in {(p.relative_path, p.offset, p.length) for p in places}:
            _check(Path(self.path) / name, offset=offset, length=length)
        return super().read_data(plan, planner)


def _check(path: Path, *, offset: int, length: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        written = io.BytesIO(file.read(length))
    try:
        with zipfile.ZipFile(written) as archive:
            is_whole = archive.testzip() is None
    except Exception:  # whatever a reader of archives stumbles over
        is_whole = False
    if not is_whole:
        raise OSError(f"{path} is damaged between bytes {offset} and {offset + length}")
