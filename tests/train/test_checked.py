"""A checkpoint whose bytes are not those that were written is refused, wherever they differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fullbore.errors import CheckpointError
from fullbore.train.checkpoint import find_checkpoint, read_progress, read_state


@pytest.mark.filterwarnings("ignore")
def test_a_flipped_bit_and_a_block_of_zeros_are_seen(tmp_path: Path) -> None:
    state = {name: torch.randn(64, 64) for name in ("one", "two")}
    state_dict_saver.save(dict(state), storage_writer=FileSystemWriter(tmp_path), no_dist=True)

    def read() -> dict[str, torch.Tensor]:
        found = {name: torch.zeros(64, 64) for name in state}
        read_state(found, checkpoint=tmp_path)
        return found

    assert all(torch.equal(tensor, state[name]) for name, tensor in read().items())
    (file,) = tmp_path.glob("*.distcp")
    written = file.read_bytes()
    middle = len(written) // 4  # in the numbers of the first tensor
    for damage in (bytes([written[middle] ^ 16]), bytes(512)):
        file.write_bytes(written[:middle] + damage + written[middle + len(damage) :])
        with pytest.raises(CheckpointError, match=r"\.distcp is damaged between bytes 0 and \d+"):
            read()


@pytest.mark.parametrize(
    "change", [{"step": "4"}, {"sequences": None}, {"ranks": -1}, {"dtype": "nn"}, {"course": [1]}]
)
def test_progress_that_nobody_wrote_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    as_written = {"step": 4, "sequences": 32, "ranks": 2, "dtype": "float32"}
    (tmp_path / "run.json").write_text(json.dumps(as_written))
    assert read_progress(tmp_path).step == 4
    (tmp_path / "run.json").write_text(json.dumps(as_written | change))
    with pytest.raises(CheckpointError, match="not as it was written"):
        read_progress(tmp_path)


def test_a_run_that_ended_between_two_renamings_has_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "iter_0000004").mkdir()
    (tmp_path / "iter_0000004" / "run.json").write_text("{}")
    (tmp_path / "latest").write_text("iter_0000004")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000004"
    (tmp_path / "iter_0000004").rename(tmp_path / ".iter_0000004.old")
    assert find_checkpoint(tmp_path) == tmp_path / ".iter_0000004.old"
    (tmp_path / "iter_0000004").mkdir()
    with pytest.raises(CheckpointError, match="which is no checkpoint"):
        find_checkpoint(tmp_path)
