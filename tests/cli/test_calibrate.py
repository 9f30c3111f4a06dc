"""`fullbore calibrate` as people type it: what it measures, writes, says and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fullbore.cost.hardware import Cluster

pytest.importorskip("torch")

pytestmark = pytest.mark.timeout(300)  # two processes import torch, on cores that may be busy

COMMAND = [sys.executable, "-m", "fullbore", "calibrate", "--device", "cpu", "--quick"]


def test_two_ranks_are_measured_and_the_file_makes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    command = [*COMMAND, "--ranks", "2", "--threads", "1", "-o", str(path), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    cluster = Cluster.parse(str(path))
    assert (cluster.size, cluster.device.gpus_per_node) == (2, 2)
    assert cluster.device.peak_flop_per_s("fp32") == pytest.approx(
        max(product["flop_per_s"] for product in document["products"]), rel=1e-4
    )
    assert 1e-7 < document["hop_s"] < 1.0
    assert document["network_hop_s"] is None
    errors = [abs(product["fit_error"]) for product in document["products"]]
    assert sum(errors) / len(errors) < 0.5
    assert f"wrote {path}" in ran.stderr


def test_one_rank_needs_no_other_and_threads_beyond_the_cores_are_said() -> None:
    cores = len(os.sched_getaffinity(0))
    command = [*COMMAND, "--ranks", "1", "--threads", str(cores + 1)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0
    assert f"1 rank x {cores + 1} threads on {cores} core" in ran.stderr
    assert "GFLOP/s" in ran.stdout
    assert "within the node" not in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", 0), "--ranks 0: it must be 1 or more"),
        (("--threads", -1), "--threads -1: it must be 1 or more"),
        (("--ranks", 10**6), "--ranks 1000000: on one machine it must be at most 1024"),
        (("--threads", 10**9), "--threads 1000000000: on one machine it must be at most 1024"),
        (("--precision", "fp4"), "--precision fp4: choose fp32, bf16, fp16"),
        (("-o", "here.json"), "a cluster file is TOML; end the name in .toml"),
        (("-o", "no/such/here.toml"), "there is no folder"),
        (("--device", "tpu"), "--device tpu: choose auto, cpu or cuda"),
    ],
)
def test_wrong_input_is_named(fullbore, arguments, said) -> None:
    ran = fullbore("calibrate", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err


def test_ctrl_c_leaves_the_older_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    path.write_text("older\n")
    command = [*COMMAND, "--ranks", "2", "--threads", "1", "-o", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (0, 130)  # 0 where it was done before
    if process.returncode == 130:
        assert path.read_text() == "older\n"
        assert "Traceback" not in err
    assert [found.name for found in tmp_path.iterdir()] == ["here.toml"]
