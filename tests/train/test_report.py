"""What a person sees of a run, and what is written down."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import training_jobs as jobs
from rich.console import Console

from fullbore.errors import ConfigError
from fullbore.train.loop import train
from fullbore.train.report import Reporter
from fullbore.train.team import Team
from fullbore.train.trainer import Trainer


def run(folder: Path, *, cores: int = 2, terminal: bool = False, **changes: object) -> str:
    """Everything that is said about a short run."""
    settings = jobs.settings_for(
        folder,
        **{"train_iters": 3, "eval_interval": 2, "eval_iters": 1, "held_out": 0.1, **changes},
    )
    trainer = Trainer(settings, Team(), device=jobs.CPU, cores=cores)
    said = io.StringIO()
    reporter = Reporter(Console(file=said, force_terminal=terminal, width=120, color_system=None))
    try:
        train(trainer, observer=reporter, should_stop=lambda: False)
    finally:
        reporter.close()
        trainer.close()
    return said.getvalue()


def test_lines_without_a_terminal(folder: Path, tmp_path: Path) -> None:
    said = run(folder, save=tmp_path, export=tmp_path / "exported").splitlines()
    assert "LlamaForCausalLM, 4 layers, on 1 ranks: 1f1b" in said[0]
    assert said[1] == "stage 0 on rank 0: embedding, layers 0-3, head (100.0%)"
    shown = [line for line in said if line.startswith("step")]
    assert [line.split()[1] for line in shown] == ["0", "1", "2", "2", "3", "3"]
    assert "held-out loss" in shown[0] and "held-out loss" in shown[-1]
    for word in ("loss", "tokens/s", "MFU", "bubble 0."):
        assert word in shown[1]
    assert f"saved {tmp_path / 'iter_0000003'}" in said
    assert f"exported {tmp_path / 'exported'}, a folder that transformers loads" in said


def test_a_bar_on_a_terminal(folder: Path, tmp_path: Path) -> None:
    said = run(folder, save=tmp_path, terminal=True)
    assert "3/3" in said and "tokens/s" in said and "MFU" in said


def test_metrics_are_one_object_a_line_and_go_on_after_a_resume(
    folder: Path, tmp_path: Path
) -> None:
    run(folder, save=tmp_path)
    again = {"train_iters": 4, "eval_interval": None}
    said = run(folder, save=tmp_path, load=tmp_path, **again)
    assert "resumed after step 3" in said
    assert "so not with the identical trajectory: --train-iters 4 (was 3)" in said
    assert "otherwise" not in run(folder, save=tmp_path, load=tmp_path, recompute=1, **again)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [0, 2, 3]
    first = steps[0]
    assert first["tokens_per_s"] == pytest.approx(4 * 16 / first["step_s"])
    assert 0 < first["mfu"] < 1
    assert 0 <= first["bubble_fraction"] < 1
    assert first["peak_activation_bytes"][0] > 0
    assert first["grad_norm"] > 0


def test_no_bubble_is_told_where_ranks_share_cores(folder: Path, tmp_path: Path) -> None:
    said = run(folder, save=tmp_path, cores=0)
    assert "more ranks than cores" in said
    assert "bubble n/a" in said
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert line["bubble_fraction"] is None


def test_log_interval_thins_the_lines(folder: Path, tmp_path: Path) -> None:
    said = run(folder, save=tmp_path, log_interval=2, eval_interval=None)
    shown = [line for line in said.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in shown] == ["2"]


def test_tensorboard_gets_the_same_figures(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(folder, save=tmp_path / "run", tensorboard_dir=tmp_path / "board")
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    wanted = {line["step"]: line["loss"] for line in lines if "loss" in line}
    found = {event.step: event.value for event in board.Scalars("loss")}
    assert found == pytest.approx(wanted)
    assert [event.step for event in board.Scalars("held_out_loss")] == [0, 2, 3]


def test_a_folder_that_cannot_be_written_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write to --save"):
        run(folder, save=tmp_path / "file")


def test_an_export_that_is_in_the_way_is_refused_before_training(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "exported").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        run(folder, save=tmp_path / "run", export=tmp_path / "exported")
    assert not (tmp_path / "run").exists()


def test_a_full_disk_costs_the_metrics_and_not_the_run(folder: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    said = run(folder, save=tmp_path)
    assert said.count("metrics are no longer written") == 1
    assert f"saved {tmp_path / 'iter_0000003'}" in said
