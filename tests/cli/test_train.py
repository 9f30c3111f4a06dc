"""`fullbore train` and `export` as people start them: flags, files, processes, signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_runs import (
    FULLBORE,
    PATIENCE_S,
    TORCHRUN,
    children,
    flags,
    metrics,
    ran,
    ranks_of,
    started,
    wait_for_steps,
)
from launching import environment, write_files
from planning import found_job

from fullbore.plan.emit.fullbore import fullbore_launch

# -- processes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run on two ranks that Ctrl-C has stopped, and what it said."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    command = [*FULLBORE, "train", *flags(folder, save=run, train_iters=100000), "-p", "2"]
    with started(command, cold=True) as process:
        wait_for_steps(process, run, 3)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    return run, said


@pytest.mark.slow(10)
def test_ctrl_c_saves_and_leaves(stopped: tuple[Path, str], tmp_path: Path) -> None:
    run, said = stopped
    done = json.loads((run / (run / "latest").read_text() / "run.json").read_text())["step"]
    assert done == metrics(run)[-1]["step"] >= 3
    assert f"stopped after step {done}" in said
    assert "Traceback" not in said
    status, said = ran([*FULLBORE, "export", str(run), str(tmp_path / "exported")])
    assert status == 0, said
    assert (tmp_path / "exported" / "model.safetensors").exists()


@pytest.mark.slow(10)
@pytest.mark.parametrize(("after_s", "cold"), [(0.2, True), (0.2, False)])
def test_ctrl_c_while_ranks_start_is_quiet(
    folder: Path, tmp_path: Path, after_s: float, cold: bool
) -> None:
    """While they import, and, where they have imported all of it, while they load."""
    command = [*FULLBORE, "train", *flags(folder, save=tmp_path, train_iters=100000), "-p", "2"]
    with started(command, cold=cold) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while not ranks_of(process):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in said and "KeyboardInterrupt" not in said, said
    assert process.returncode == 130 or "stopped after step" in said


@pytest.mark.slow(10)
def test_a_stopped_run_goes_on_under_torchrun(
    stopped: tuple[Path, str], folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped[0], run)
    done = metrics(run)[-1]["step"]
    options = flags(folder, save=run, load=run, train_iters=done + 2, export=tmp_path / "hf")
    status, said = ran([*TORCHRUN, "2", "-m", "fullbore", "train", *options, "-p", "2", "-v", "2"])
    assert status == 0, said
    assert [line["step"] for line in metrics(run)] == [*range(1, done + 3)]
    assert (run / "latest").read_text() == f"iter_{done + 2:07d}"
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert "interleaved, 2 stages a rank" in said


@pytest.mark.slow(10)
def test_replicas_are_started_and_counted_under_torchrun(folder: Path, tmp_path: Path) -> None:
    options = flags(folder, save=tmp_path, train_iters=2, data_parallel_size=2)
    status, said = ran([*FULLBORE, "train", *options, "--use-distributed-optimizer"])
    assert status == 0, said
    assert "on 2 replicas of 1 ranks: 1f1b" in said and "2 microbatches of 1 x 16 tokens" in said
    options = flags(folder, save=tmp_path, load=tmp_path, train_iters=3)
    status, said = ran([*TORCHRUN, "2", "-m", "fullbore", "train", *options])
    assert status == 0, said
    assert "on 2 replicas of 1 ranks" in said and "resumed after step 2" in said
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.slow(10)
def test_a_plan_trains_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    made = found_job(
        cluster="h100:1x2",
        model=str(folder / "model"),
        config=json.loads((folder / "model" / "config.json").read_text()),
        asked={"sequence": 16, "global_batch": 8},
    )
    launch = fullbore_launch(made)
    script = write_files(tmp_path / "launch", launch.files) / launch.script
    run = tmp_path / "run"
    env = environment(
        Path(sys.executable).parent, {"DATA": str(folder / "text.jsonl"), "SAVE": str(run)}
    )
    options = ["--train-iters", "100000", "--threads", "1", "--device", "cpu"]
    with started(["bash", str(script), *options], env=env) as process:
        wait_for_steps(process, run, 2)
        assert launch.ranks is not None
        family = [psutil.Process(process.pid), *children(process)]
        ranks = [one for one in family if re.search(launch.ranks, " ".join(one.cmdline()))]
        assert len(ranks) == 2
        ranks[0].send_signal(signal.SIGTERM)  # as the batch script does
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert "schedule" in said and "4 microbatches of 2 x 16 tokens" in said
    assert f"stopped after step {metrics(run)[-1]['step']}" in said and (run / "latest").exists()


@pytest.mark.slow(10)
def test_sigterm_to_the_launcher_alone_saves_too(folder: Path, tmp_path: Path) -> None:
    command = [*FULLBORE, "train", *flags(folder, save=tmp_path, train_iters=100000), "-p", "2"]
    with started(command) as process:
        wait_for_steps(process, tmp_path, 1)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert not children(process)
    assert process.returncode == 0, said
    assert (tmp_path / (tmp_path / "latest").read_text() / "run.json").exists()


@pytest.mark.slow(10)
def test_ranks_do_not_outlive_a_launcher_that_is_killed(folder: Path, tmp_path: Path) -> None:
    command = [*FULLBORE, "train", *flags(folder, save=tmp_path, train_iters=100000), "-p", "2"]
    with started(command) as process:
        wait_for_steps(process, tmp_path, 1)
        family = children(process)
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        for child in alive:
            child.kill()
    assert len(family) >= 4 and not alive  # two ranks, the server that forked them, and another


@pytest.mark.slow(10)
def test_torchrun_with_another_number_of_processes_is_refused(folder: Path, tmp_path: Path) -> None:
    command = [*TORCHRUN, "1", "-m", "fullbore", "train", *flags(folder, save=tmp_path)]
    status, said = ran([*command, "-p", "2"])
    assert status != 0
    assert "fullbore: 1 processes were started and --pipeline-model-parallel-size is 2" in said


@pytest.mark.slow(10)
def test_an_error_in_the_ranks_is_told_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    options = flags(folder, save=tmp_path / "run", data=tmp_path / "empty.txt")
    status, said = ran([*FULLBORE, "train", *options, "-p", "2"])
    assert status == 2
    assert [line for line in said.splitlines() if line.startswith("fullbore:")] == [
        "fullbore: the training text is empty (1 files)"
    ]
    assert "Traceback" not in said


# -- flags and files ---------------------------------------------------------------------------


SLICES = ("-p", 2, "--schedule", "seq1f1b")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["-p", 2, "--global-batch-size", 7, "--micro-batch-size", 2], "6 or 8"),
        (["--data-parallel-size", 3], "6 or 9"),
        (["--data-parallel-size", 0], "value is 1"),
        (["-p", 2, "-v", 0], "value is 1"),
        (["-p", 4, "-v", 2, "-g", 3, "--global-batch-size", 8], "value is 4"),
        (["-p", 4, "-v", 2, "--global-batch-size", 10], "8 or 12"),
        (["-p", 2, "--num-layers-per-virtual-pipeline-stage", 3], "2"),
        (["-p", 2, "-v", 3], "P=2 with v=2"),
        (["-p", 9], "P=5 with v=1"),
        (["-p", 2, "--stage-layers", "1,1,1"], "2 or 4"),
        (["-p", 2, "--stage-layers", "1,2"], "has 4: change them by +1"),
        (["-p", 3, "--stage-layers", "2,0,2"], "leaves a stage empty"),
        (["-p", 3, "--decoder-last-pipeline-num-layers", 1], "2"),
        (["-p", 2, "--schedule", "1g1b"], "no schedule is called '1g1b'"),
        (["-p", 0], "1"),
        (["-p", 2, "--slices", 2], "leave it at 1, or choose seq1f1b"),
        ([*SLICES, "--slices", 3, "--seq-length", 16], "3 --slices of one length: the nearest"),
        ([*SLICES, "--offload", 1], "what later --slices attend to"),
        ([*SLICES, "--recompute", 2], "with --slices: the nearest legal value is full"),
        (["--lr-warmup-iters", 100], "nearest legal value is 99"),
        (["--min-lr", 1], "above --lr"),
        (["--seq-length", 1], "--seq-length 1: input should be greater than or equal to 2"),
        (["--stage-layers", "a,b"], "--stage-layers"),
    ],
)
def test_arithmetic_is_refused_before_anything_starts(
    fullbore: Callable[..., Any], folder: Path, tmp_path: Path, given: list[object], words: str
) -> None:
    text = ["--model", folder / "model", "--data", folder / "text.jsonl"]
    found = fullbore("train", *text, "--save", tmp_path / "run", *given)
    assert found.status == 2
    assert words in found.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "nowhere/at/all"}, "there is no model folder or file nowhere/at/all"),
        ({"data": "no-such-text"}, "there is no training text no-such-text"),
        ({"load": "no-such-run"}, "there is no checkpoint in no-such-run"),
    ],
)
def test_what_cannot_be_read_is_named(
    fullbore: Callable[..., Any], folder: Path, tmp_path: Path, given: dict[str, str], words: str
) -> None:
    found = fullbore("train", *flags(folder, save=tmp_path, **given))
    assert found.status == 2
    assert words in found.err


def test_missing_flags_are_named(fullbore: Callable[..., Any]) -> None:
    found = fullbore("train")
    assert found.status == 2
    assert "--model is missing" in found.err
    assert "--data is missing" in found.err


CONFIGS = {
    "run.yaml": "model: {model}\ndata: [{data}]\ntrain-iters: 2\nseq_length: 16\n",
    "run.toml": 'model = "{model}"\ndata = "{data}"\ntrain-iters = 2\nseq_length = 16\n',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_holds_the_same_names_and_the_command_line_wins(
    fullbore: Callable[..., Any], folder: Path, tmp_path: Path, name: str
) -> None:
    config, run = tmp_path / name, tmp_path / "run"
    text = CONFIGS[name].format(model=folder / "model", data=folder / "text.jsonl")
    config.write_text(text, encoding="utf-8")
    found = fullbore(
        "train",
        *("--config", config),
        *("--save", run),
        *("--train-iters", 1),
        *("--device", "cpu"),
        *("--threads", 1),
    )
    assert found.status == 0, found.err
    assert [line["step"] for line in metrics(run)] == [1]
    assert "8 microbatches of 1 x 16 tokens" in found.out


def test_without_the_optimizer_s_barrier_every_step_is_written_down(
    fullbore: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    options = flags(
        folder, train_iters=3, save_interval=2, held_out=0.1, eval_interval=2, clip_grad=0.5
    )
    runs = []
    for name, flag in (("late", "--no-optimizer-barrier"), ("barrier", "--optimizer-barrier")):
        found = fullbore("train", *options, "--save", tmp_path / name, flag)
        assert found.status == 0, found.err
        lines = metrics(tmp_path / name)
        runs.append([(m["step"], m.get("loss"), m.get("held_out_loss")) for m in lines])
    assert runs[0] == runs[1]
    assert (tmp_path / "late" / "latest").read_text() == "iter_0000003"


def test_unknown_keys_are_named_with_what_was_meant(
    fullbore: Callable[..., Any], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: a\ndata: b\nmicro_batchsize: 2\n", encoding="utf-8")
    found = fullbore("train", "--config", config)
    assert found.status == 2
    assert "unknown key micro_batchsize; did you mean micro_batch_size" in found.err
    config.write_text("train-iters: 1\ntrain_iters: 5\n", encoding="utf-8")
    result = fullbore("train", "--config", config)
    assert result.status == 2 and "train-iters and train_iters are the same" in result.err
    config.write_text("model: [unclosed", encoding="utf-8")
    assert "cannot read the configuration" in fullbore("train", "--config", config).err
    assert "ends in .toml" in fullbore("train", "--config", tmp_path / "run.ini").err


def test_checkpoints_of_another_run_are_not_mixed_in(
    fullbore: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    options = flags(folder, save=tmp_path, train_iters=1, held_out=0.1, eval_interval=1)
    assert fullbore("train", *options).status == 0
    assert [sorted(line)[0] for line in metrics(tmp_path)] == [
        "held_out_loss",
        "bubble_fraction",
        "held_out_loss",
    ]
    again = fullbore("train", *options)
    assert again.status == 2
    assert f"go on with it by --load {tmp_path}" in again.err


def test_help_and_refusals_need_no_torch() -> None:
    code = """
import sys
from fullbore.cli.main import main
for arguments in (["train", "--help"], ["export", "--help"], ["train", "--config", "run.ini"],
                  ["train", "--model", "a", "--data", "b", "-p", "2", "--global-batch-size", "0"]):
    try:
        main(arguments)
    except SystemExit:
        assert "torch" not in sys.modules, arguments
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "--pipeline-model-parallel-size" in done.stdout
