"""`fullbore compare`: what is refused at once, and real runs with their report."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_runs import FULLBORE, PATIENCE_S, Process, ranks_of
from command_runs import start as start_command
from tiny_text import write_model, write_text

from fullbore import schedules
from fullbore.cli import compare_run
from fullbore.cost import Costs
from fullbore.errors import CostsError

pytest.importorskip("torch")

import comparisons

from fullbore.train.comparison import Handover

# -- refusals --------------------------------------------------------------------------------------

PACED = ("compare", "--paced", "-p", 4)
TRAINED = ("compare", "--model", "none", "--data", "none", "-p", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PACED, "--steps", 0), "--steps is 0: the nearest legal value is 1"),
        ((*PACED, "--steps", 3, "--warmup-steps", 3), "nearest legal value is 2"),
        ((*PACED, "--warmup-steps", -1), "nearest legal value is 0"),
        (("compare", "--paced"), "-p) is missing"),
        ((*PACED, "-m", 0), "--num-microbatches is 0: the nearest legal value is 1"),
        ((*PACED, "-m", 6, "--global-batch-size", 8), "make it 6"),
        (
            (*PACED, "--micro-batch-size", 3, "--global-batch-size", 8),
            "nearest legal values are 6 or 9",
        ),
        ((*PACED, "--schedules", ","), "--schedules names none"),
        ((*PACED, "--schedules", "gpipe,gpipe"), "two schedules are called gpipe"),
        ((*PACED, "--schedules", "zigzag"), "no schedule or CSV file is called 'zigzag'"),
        ((*PACED, "--schedules", "gpipe,1f1b", "-v", 2), "is for interleaved and looped-bfs"),
        ((*PACED, "--schedules", "looped-bfs", "-g", 4), "is for interleaved"),
        ((*PACED, "-g", 3), "3"),
        ((*PACED, "--seq-length", 64, "--lr", 1), "leave out --lr, --seq-length"),
        ((*PACED, "--offload", 1), "leave out --offload"),
        ((*PACED, "--forward-s", 0), "--forward-s is 0.0"),
        ((*PACED, "--message-bytes", 1), "--message-bytes is 1: the nearest legal value is 4"),
        ((*PACED, "--costs", "none.json"), "cannot read costs from none.json"),
        ((*TRAINED, "--forward-s", 1), "add --paced"),
        ((*TRAINED, "--message-bytes", 64), "add --paced"),
        (TRAINED, "there is no training text none|cannot load none|no folder"),
        (("compare", "-p", 2, "--data", "none"), "--model is missing"),
        ((*TRAINED, "-m", 3), "less than P=2: the nearest legal M is 2 or 4"),
    ],
    ids=lambda value: " ".join(map(str, value[1:])) if isinstance(value, tuple) else None,
)
def test_wrong_input_is_refused_before_anything_runs(
    fullbore, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ran = fullbore(*arguments)
    assert ran.status == 2 and ran.out == ""
    assert any(part in ran.err for part in message.split("|")), ran.err
    assert not list(tmp_path.glob("runs/compare/report*"))


def test_costs_and_seconds_together_are_refused(fullbore, tmp_path):
    Costs.uniform(stages=4).save(tmp_path / "costs.json")
    ran = fullbore(*PACED, "--costs", tmp_path / "costs.json", "--forward-s", 1)
    assert ran.status == 2 and "leave --forward-s" in ran.err


def test_costs_of_a_number_of_stages_that_does_not_fit_are_refused(fullbore, tmp_path):
    Costs.uniform(stages=3).save(tmp_path / "costs.json")
    ran = fullbore(*PACED, "--costs", tmp_path / "costs.json")
    assert ran.status == 2 and "of 3 stages and cannot be told for 4" in ran.err


def test_a_file_of_another_shape_is_refused(fullbore, tmp_path):
    file = tmp_path / "mine.csv"
    schedules.gpipe(ranks=4, microbatches=3).to_csv(file)
    ran = fullbore(*PACED, "-m", 8, "--schedules", f"gpipe,{file}")
    assert ran.status == 2 and "mine has P=4 and M=3, and the job P=4 and M=8" in ran.err


def test_a_file_says_how_many_microbatches_not_slices_there_are(fullbore, tmp_path):
    file = tmp_path / "sliced.csv"
    schedules.seq1f1b(ranks=4, microbatches=3, slices=2).to_csv(file)
    ran = fullbore(*PACED, "--message-bytes", 1, "--schedules", f"{file},1f1b")
    assert (
        "nearest legal value is 4" in ran.err
    )  # P and M are what the file says, so far all is well


def test_what_the_runtime_cannot_carry_out_is_refused(fullbore):
    ran = fullbore(*PACED, "-m", 8, "--schedules", "1f1b,dualpipe")
    assert ran.status == 2 and "dualpipe" in ran.err and "simulate it" in ran.err


def test_slices_of_no_schedule_are_refused(fullbore):
    ran = fullbore(*PACED, "-m", 8, "--schedules", "1f1b", "--slices", 2)
    assert ran.status == 2 and "--slices is for seq1f1b: compare it too" in ran.err


def test_an_output_that_cannot_be_made_is_refused(fullbore, tmp_path):
    (tmp_path / "file").touch()
    ran = fullbore(*PACED, "-o", tmp_path / "file" / "folder")
    assert ran.status == 2 and "cannot make --output" in ran.err


def test_it_starts_its_ranks_itself(fullbore, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ran = fullbore(*PACED)
    assert ran.status == 2 and "without torchrun" in ran.err


def test_a_prediction_that_fails_costs_no_measurement(tmp_path, monkeypatch, capsys):
    def measured(job: object, handover: Path) -> None:
        Handover(handover).put(comparisons.TRAINED, comparisons.measurement("1f1b", 2, 4))

    monkeypatch.delattr("fullbore.compare.outcome.simulate")
    monkeypatch.setattr(compare_run, "_launch", measured)
    job: Any = SimpleNamespace(schedules=["one"])
    with pytest.raises(CostsError, match=r"in the report, but .*: 1f1b: NameError"):
        compare_run.run(job, tmp_path / "out", as_json=False)
    assert "1f1b" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "out" / "report.json").read_text())["schedules"]
    assert row["measured"]["step_s"] > 0 and row["predicted"] is None
    assert (tmp_path / "out" / "report.html").exists()


# -- runs ------------------------------------------------------------------------------------------


def start(*arguments: object, cold: bool = False) -> Process:
    """Fullbore in a session of its own."""
    return start_command([*FULLBORE, *map(str, arguments)], cold=cold)


def finish(process: Process) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr, in bounded time."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session of this process alone
    return process.returncode, out, err


def finite(value: Any) -> bool:
    """Whether every number within is finite."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def job(folder: Path, **changes: object) -> list[object]:
    values = {
        "model": folder / "model",
        "data": folder / "text.jsonl",
        "data-cache-path": folder / "cache",
        "seq-length": 16,
        "held-out": 0.2,
        "lr": 0.003,
        "device": "cpu",
        "threads": 1,
        "steps": 3,
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    return ["compare", *(part for name, value in values.items() for part in (f"--{name}", value))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    write_model(made / "model")
    write_text(made / "text.jsonl")
    return made


@pytest.mark.slow
def test_a_tiny_llama_under_three_schedules(folder, tmp_path):
    output = tmp_path / "out"
    status, out, err = finish(start(*job(folder), "-p", 2, "-m", 4, "-o", output, "--json"))
    assert status == 0, err
    document = json.loads(out)
    assert document == json.loads((output / "report.json").read_text())
    assert finite(document) and document["complete"]
    rows = document["schedules"]
    assert [row["schedule"] for row in rows] == ["gpipe", "1f1b", "interleaved"]
    for row in rows:
        measured, predicted = row["measured"], row["predicted"]
        assert 0 < measured["bubble_fraction"] < 1 and 0 < predicted["bubble_fraction"] < 1
        # what autograd keeps is the same each time, so its prediction is exact
        assert measured["peak_activation_bytes"] == predicted["peak_activation_bytes"]
        assert 0 < measured["mfu"] < 1 and len(row["steps"]) == 2
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-4)
        assert row["held_out_loss_after"] < row["held_out_loss_before"]
        assert Costs.load(output / row["costs_file"]) == Costs.parse(row["costs"])
    gpipe, one_f_one_b, _ = (row["measured"]["peak_activation_bytes"] for row in rows)
    assert gpipe[0] == 2 * one_f_one_b[0]  # four microbatches against two
    page = (output / "report.html").read_text()
    for name in ("gpipe", "1f1b", "interleaved v=2"):
        assert f"<h2>{name}, predicted</h2>" in page and f"<h2>{name}, measured</h2>" in page


@pytest.mark.slow
def test_activations_that_leave_for_the_host(folder, tmp_path):
    run = (*job(folder, steps=3), "-p", 2, "-m", 4, "--schedules", "gpipe", "--offload", 1)
    status, out, err = finish(start(*run, "-o", tmp_path / "out", "--json"))
    assert status == 0, err
    (row,) = json.loads(out)["schedules"]
    costs = Costs.parse(row["costs"])
    for stage in costs.stages:
        assert stage.offload_s > 0 and stage.reload_s > 0
        assert 0 < stage.offload_bytes <= stage.activation_bytes
    held = [4 * stage.activation_bytes for stage in costs.stages]
    for side in ("measured", "predicted"):
        assert all(
            peak <= most
            for peak, most in zip(row[side]["peak_activation_bytes"], held, strict=True)
        )


@pytest.mark.slow
def test_more_ranks_than_cores_get_a_warning_and_a_file_is_a_schedule(folder, tmp_path):
    ranks = len(os.sched_getaffinity(0)) + 1
    if ranks > 4:
        pytest.skip("the tiny model has no stages for more ranks than this machine has cores")
    schedules.one_f_one_b(ranks=ranks, microbatches=3).to_csv(tmp_path / "mine.csv")
    names = f"gpipe,{tmp_path / 'mine.csv'}"
    status, out, err = finish(
        start(*job(folder, steps=2), "--schedules", names, "-o", tmp_path / "out")
    )
    assert status == 0, err
    assert f"Warning: {ranks} ranks share" in out and "\nmine " in out
    document = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(document["warnings"]) == 1 and document["microbatches"] == 3
    assert f"Warning: {ranks} ranks share" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
def test_a_paced_run_of_four_ranks(tmp_path):
    output = tmp_path / "out"
    pace = ("--forward-s", 0.004, "--backward-s", 0.008, "--message-bytes", 1024)
    chosen = ("--schedules", "gpipe,1f1b,interleaved,zb-v,dualpipe-v,seq1f1b")
    status, out, err = finish(start(*PACED, "-m", 8, *pace, *chosen, "--steps", 2, "-o", output))
    assert status == 0, err
    assert "MFU" not in out and "Warning" not in out and str(output / "report.html") in out
    document = json.loads((output / "report.json").read_text())
    assert finite(document) and document["message_bytes"] == 1024
    for row in document["schedules"]:
        v = row["virtual_stages"]
        assert row["measured"]["busy_s"] == pytest.approx([8 * 0.012] * 4)  # the nominal sleep
        assert row["costs"]["stages"][0]["forward_s"] == pytest.approx(0.004 / v)
        assert row["costs"]["overhead_s"] > 0
        assert row["measured"]["peak_activations"] == row["predicted"]["peak_activations"]
        assert row["measured"]["makespan_s"] > 11 * 0.012 / (v * row["slices"])
    # and its costs are an input again, for another placement of the same four stages
    again = ("--costs", output / "costs-1f1b.json", "--schedules", "interleaved", "-o", output)
    status, out, err = finish(start("compare", "--paced", "-p", 2, "--steps", 2, *again, "--json"))
    assert status == 0, err
    (row,) = json.loads(out)["schedules"]
    assert row["costs"]["stages"][0]["backward_s"] == pytest.approx(0.008)


@pytest.mark.slow
def test_ctrl_c_leaves_cleanly_and_keeps_what_was_measured(tmp_path):
    output = tmp_path / "out"
    process = start(
        "compare", "--paced", "-p", 2, "-m", 4, "--steps", 10_000, "--schedules", "1f1b,gpipe",
        "-o", output, cold=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "1f1b: step 5/" in line:
            break
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130, err
    assert "ended early; the report holds 1f1b" in err and "Traceback" not in err
    document = json.loads((output / "report.json").read_text())
    (row,) = document["schedules"]
    assert not document["complete"] and len(row["steps"]) >= 4
    assert "Stopped early: 1f1b" in (output / "report.html").read_text()


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path):
    process = start(
        "compare", "--paced", "-p", 2, "-m", 4, "--forward-s", 20, "--schedules", "1f1b",
        "-o", tmp_path / "out",
    )  # fmt: skip
    assert process.stderr is not None
    next(line for line in process.stderr if "loading" in line)
    for _ in range(2):
        time.sleep(1)  # the ranks are to be in their first step, which takes minutes
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    status, _, err = finish(process)
    assert status == 130, err
    assert "ended before a step was measured" in err and "Traceback" not in err
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.slow
def test_a_killed_rank_is_an_error_that_keeps_the_schedules_before(tmp_path):
    output = tmp_path / "out"
    process = start(
        "compare", "--paced", "-p", 2, "-m", 4, "--steps", 40, "--schedules", "1f1b,gpipe",
        "-o", output,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "gpipe: step 2/" in line:
            break
    ranks_of(process)[-1].kill()
    began_s = time.monotonic()
    status, _, err = finish(process)
    assert status == 2, err
    assert "Traceback" not in err and "fullbore: " in err
    assert time.monotonic() - began_s < PATIENCE_S
    document = json.loads((output / "report.json").read_text())
    assert [row["schedule"] for row in document["schedules"]] == ["1f1b"]
