"""`fullbore search` as people type it: what it writes, says and refuses."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fullbore.ir import Schedule

# The first search on a machine compiles its kernels, which takes long where others want the cores.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    stages = [{"forward_s": 1.0, "input_grad_s": 1.2, "weight_grad_s": 0.8} for _ in range(3)]
    stages.append({"forward_s": 2.0, "input_grad_s": 2.5, "weight_grad_s": 1.5})  # a heavy head
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"stages": stages, "hop_s": 0.05}))
    return path


@pytest.fixture
def job(costs: Path) -> tuple[object, ...]:
    return ("search", "--costs", costs, "-p", 4, "-m", 6, "--memory-limit", "1x")


def test_what_is_found_is_written_checked_and_simulated(
    fullbore: Callable[..., Any], job: tuple[object, ...], tmp_path: Path
) -> None:
    csv, own = tmp_path / "best.csv", tmp_path / "own.json"
    found = fullbore(*(*job, "--iterations", 2000, "-o", csv, "--output-costs", own, "--json")).json
    assert found["lower_bound_s"] <= found["value_s"] <= found["best_named_s"]
    assert found["value_s"] == found["makespan_s"]
    assert found["gap"] == pytest.approx(1 - found["lower_bound_s"] / found["value_s"])
    assert max(found["peak_activations"]) <= 4
    assert fullbore("check", csv).status == 0
    again = fullbore("simulate", csv, "--costs", own, "--json").json
    assert again["makespan_s"] == pytest.approx(found["makespan_s"], rel=1e-12)
    assert Schedule.from_csv(csv).microbatches == 6


def test_it_says_how_far_from_perfect_it_is(
    fullbore: Callable[..., Any], job: tuple[object, ...]
) -> None:
    said = fullbore(*job, "--iterations", 500)
    assert said.status == 0 and said.err == ""
    for words in ("lower bound", "gap", "best named", "searched"):
        assert f"\n{words} " in said.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--objective", "fun"), "choose makespan or span"),
        (("--virtual-stages", "1;2"), "write numbers such as 1,2,4"),
        (("-o", "best.svg"), "end the name in .csv"),
        (("--memory-limit", "lots"), "lots"),
        (("--memory-limit", "40GB"), "activation_bytes"),
        (("--memory-limit", "0.1"), "too tight for one microbatch"),
    ],
)
def test_what_makes_no_sense_is_refused(
    fullbore: Callable[..., Any],
    job: tuple[object, ...],
    flags: tuple[str, str],
    said: str,
) -> None:
    ran = fullbore(*job, *flags, "--iterations", 10)
    assert ran.status == 2 and said in ran.err and ran.out == ""


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_keeps_the_best_so_far(
    job: tuple[object, ...], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    tight = ("-m", "30", "--memory-limit", "0.75x")  # so that no proof ends it
    endless = [*map(str, job), *tight, "--time-limit", "300"]
    command = [sys.executable, "-m", "fullbore", *endless]
    child = subprocess.Popen(
        [*command, "-o", str(tmp_path / "best.csv")],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)  # so that reading ends where the child does
    try:
        seen, deadline_s = b"", time.monotonic() + 300
        while b"Ctrl-C keeps it" not in seen:
            assert time.monotonic() < deadline_s, seen
            seen += os.read(ours, 4096)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=50)
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    assert child.returncode == 0 and b"lower bound" in out
    assert Schedule.from_csv(tmp_path / "best.csv").microbatches == 30
