"""A run on a schedule from a file: what flags may still say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fullbore.errors import FullboreError
from fullbore.passes import insert_communication, recompute_ahead
from fullbore.schedules import build, dualpipe, eager_1f1b, zb_v
from fullbore.train.settings import TrainSettings


def settings(file: Path, **more: Any) -> TrainSettings:
    given = {"model": "m", "data": "d", "schedule": str(file), "global_batch_size": 8}
    return TrainSettings.of({**given, "pipeline_model_parallel_size": 2, **more})


def test_a_file_says_the_schedule_and_v(tmp_path: Path) -> None:
    made = zb_v(ranks=2, microbatches=4)
    insert_communication(made).to_csv(tmp_path / "best.CSV")
    run = settings(tmp_path / "best.CSV", data_parallel_size=2, stage_layers="3,2,2,0")
    shape = run.shape(7)
    assert shape.build() == made and not shape.build().has_communication
    assert (shape.virtual_stages, shape.microbatches, shape.layers) == (2, 4, (3, 2, 2, 0))
    assert settings(tmp_path / "best.CSV", micro_batch_size=2).shape().layers is None


def test_a_file_says_how_sequences_are_sliced(tmp_path: Path) -> None:
    made = build("seq1f1b", ranks=2, microbatches=8, slices=4)
    made.to_csv(tmp_path / "sliced.csv")
    run = settings(tmp_path / "sliced.csv", seq_length=64)
    assert run.shape().build() == made and run.shape().microbatches == 8
    with pytest.raises(FullboreError, match="--seq-length 63 makes no 4 --slices of one length"):
        settings(tmp_path / "sliced.csv", seq_length=63)
    with pytest.raises(FullboreError, match="a schedule file says itself"):
        settings(tmp_path / "sliced.csv", seq_length=64, slices=2)


def test_a_file_says_what_is_recomputed_where_nobody_else_does(tmp_path: Path) -> None:
    recompute_ahead(eager_1f1b(ranks=2, microbatches=8), stages=[1]).to_csv(tmp_path / "again.csv")
    assert settings(tmp_path / "again.csv").recomputation == "placed"
    assert settings(tmp_path / "again.csv", recompute="full").recomputation == "full"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pipeline_model_parallel_size": 4}, "is for P=2 ranks: set --pipeline-model-parallel"),
        ({"global_batch_size": 6}, "has M=8 microbatches and the run 6"),
        ({"num_virtual_stages_per_pipeline_rank": 1}, "says it already; leave it out"),
        ({"microbatch_group_size_per_virtual_pipeline_stage": 2}, "leave it out"),
        ({"stage_layers": "3,2,2"}, "gives 3 stages of 2"),
    ],
)
def test_what_contradicts_a_file_is_refused(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    eager_1f1b(ranks=2, microbatches=8).to_csv(tmp_path / "best.csv")
    with pytest.raises(FullboreError, match=said):
        settings(tmp_path / "best.csv", **more).shape(7)


def test_files_that_are_no_schedule_to_run_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "best.csv"
    with pytest.raises(FullboreError, match="cannot read"):
        settings(file)
    file.write_text("0F0,0B0\n1B0,1F0\n")
    with pytest.raises(FullboreError):
        settings(file, global_batch_size=1)
    dualpipe(ranks=2, microbatches=8).to_csv(file)
    with pytest.raises(FullboreError):
        settings(file)
