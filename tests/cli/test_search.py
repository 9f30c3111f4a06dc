"""`fullbore search`: from a costs file to a schedule that simulates, runs and is told of."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fullbore import Schedule
from fullbore.cli.search import _line
from fullbore.cost import Costs
from fullbore.search import Progress
from fullbore.verify import verify

EFFORT = ("--iterations", 4000)

# The first search on a machine compiles its kernels, which takes long where others want the cores.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def costs(tmp_path):
    """A costs file of 8 stages, the last one heavy."""
    stage = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, "activation_bytes": 5e8}
    heavy = {**stage, "forward_s": 1.5, "weight_grad_s": 1.5}
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"stages": [stage] * 7 + [heavy], "hop_s": 0.05}))
    return file


def search(fullbore, costs, *more):
    return fullbore("search", "--costs", costs, "-p", 4, "-m", 8, *EFFORT, *more)


def test_what_is_found_is_written_simulated_and_compared(fullbore, costs, tmp_path):
    csv, own = tmp_path / "found.csv", tmp_path / "own.json"
    ran = search(
        fullbore, costs, "--memory-limit", "1x", "-o", csv, "--output-costs", own, "--json"
    )
    found = ran.json
    schedule = Schedule.from_csv(csv)
    assert verify(schedule, peak_limit=4) == []
    assert len(Costs.load(own).stages) == schedule.stages == found["stages"]
    simulated = fullbore("simulate", csv, "--costs", own, "--json").json
    assert simulated["makespan_s"] == found["makespan_s"] == found["value_s"]
    assert found["lower_bound_s"] <= found["value_s"] <= found["best_named_s"]
    assert found["gap"] == pytest.approx(1 - found["lower_bound_s"] / found["value_s"])
    assert found["placements"] == ["looped, v=1", "looped, v=2", "V, v=2"]
    assert max(found["peak_activation_bytes"]) <= 4 * 2 * 5e8


def test_it_is_told_in_words(fullbore, costs):
    told = search(fullbore, costs, "--memory-limit", "2GB").out
    for begin in ("makespan", "lower bound", "gap", "best named", "searched", "peak memory"):
        assert any(line.startswith(begin) for line in told.splitlines()), begin


def test_a_seed_gives_the_same_again(fullbore, costs):
    first, again = (search(fullbore, costs, "--seed", 5, "--json").json for _ in range(2))
    assert {**first, "elapsed_s": 0} == {**again, "elapsed_s": 0}


def test_span_hops_virtual_stages_and_robust(fullbore, costs):
    span = search(fullbore, costs, "--objective", "span", "--json").json
    assert span["objective"] == "span"
    far = search(fullbore, costs, "--hop-s", 2, "-v", "1,2", "--json").json
    assert far["makespan_s"] > span["makespan_s"]
    assert far["placements"] == span["placements"]
    hard = search(fullbore, costs, "--robust", "--jitter", 0.2, "--json").json
    assert hard["makespan_s"] < hard["p90_s"] <= hard["best_named_s"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--memory-limit", "much"), "write 8 (microbatches"),
        (("--memory-limit", "0.1"), "too tight for one microbatch"),
        (("--memory-limit", "1x", "-m", "5000", "--prove", "1"), "choose a smaller M"),
        (("--objective", "beauty"), "choose makespan or span"),
        (("-v", "3"), "the nearest legal numbers of stages are 8 and 16"),
        (("-v", "two"), "write numbers such as 1,2,4"),
        (("-o", "found.svg"), "end the name in .csv"),
        (("--robust", "--jitter", "-1"), "a jitter of -1"),
    ],
)
def test_what_means_nothing_is_refused(fullbore, costs, flags, said):
    ran = search(fullbore, costs, *flags)
    assert ran.status == 2
    assert said in ran.err


def test_ctrl_c_keeps_the_best_so_far(fullbore, costs, tmp_path, monkeypatch):
    def pressed(self, moves, **spent):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fullbore.search.budget.Budget.spend", pressed)
    csv = tmp_path / "found.csv"
    ran = fullbore("search", "--costs", costs, "-p", 4, "-m", 32, "-o", csv, "--json")
    assert ran.status == 0
    assert verify(Schedule.from_csv(csv)) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_ends_its_line_and_keeps_the_best(costs, tmp_path):
    ours, theirs = pty.openpty()
    tight = ["-p", "4", "-m", "30", "--memory-limit", "0.75x"]  # no proof ends it before
    command = [sys.executable, "-m", "fullbore", "search", "--costs", str(costs), *tight]
    child = subprocess.Popen(
        [*command, "--time-limit", "300", "-o", str(tmp_path / "best.csv")],
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


def test_where_nothing_fits_yet_it_says_so() -> None:
    progress = Progress(elapsed_s=1.0, moves=3, best_s=math.inf, bound_s=2.0)
    assert "nothing within the memory limit yet" in _line(progress)
    assert "best 4 s" in _line(replace(progress, best_s=4.0))
