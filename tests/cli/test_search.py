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
    for begin in (
        *("makespan", "lower bound", "gap", "best named", "searched", "peak memory"),
        *("memory limit      1.863 GiB a rank", "schedule          not kept: give -o FILE.csv"),
    ):
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
        (("--jitter", "0.2"), "add --robust"),
        (("--allow", "offload,swap"), "choose offload or recompute, or offload,recompute"),
        (("--memory-limit", "1GB,2GB"), "2 memory limits for 4 ranks"),
        (("--memory-limit", "1GB,2"), "mixes units"),
        (("--seed", "-1"), "the nearest legal value is 0"),
        (("--time-limit", "nan"), "a time limit of nan s: give 0 or more"),
        (("--iterations", "-3"), "a limit of -3 moves"),
        (("--prove", "nan"), "nan s for a proof: give more than 0"),
    ],
)
def test_what_means_nothing_is_refused(fullbore, costs, flags, said):
    ran = search(fullbore, costs, *flags)
    assert ran.status == 2
    assert said in ran.err


def test_each_rank_has_its_own_limit(fullbore, costs):
    limit = "3GB,4GB,4GB,8GB"
    found = search(fullbore, costs, "--memory-limit", limit, "--json").json
    assert all(
        peak <= most * 1e9
        for peak, most in zip(found["peak_activation_bytes"], (3, 4, 4, 8), strict=True)
    )
    roomy = search(fullbore, costs, "--memory-limit", "8GB", "--json").json
    tight = search(fullbore, costs, "--memory-limit", "3GB", "--json").json
    assert roomy["makespan_s"] < found["makespan_s"] < tight["makespan_s"]
    assert "2.794, 3.725" in search(fullbore, costs, "--memory-limit", limit).out.replace(
        " GiB", ""
    )


def test_what_costs_nothing_has_no_gain_to_tell(fullbore, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"stages": [{"forward_s": 0.0, "backward_s": 0.0}] * 4}))
    assert ": 0.0 % less" in search(fullbore, file).out


def test_halves_that_only_some_stages_have_are_said_to_be_of_no_use(fullbore, tmp_path):
    whole, halved = {"backward_s": 2.0}, {"input_grad_s": 1.0, "weight_grad_s": 1.0}
    stages = [{"forward_s": 1.0, **backward} for backward in (halved, whole, halved, halved)]
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"stages": stages}))
    assert "no backward is split, since stage 1 names no" in search(fullbore, file).err


def test_what_was_found_is_told_where_it_cannot_be_written(fullbore, costs, tmp_path, monkeypatch):
    def full(path: object, content: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fullbore.cli.output.replace_file", full)
    ran = search(fullbore, costs, "-o", tmp_path / "found.csv", "--json")
    assert ran.status == 2 and "No space left" in ran.err
    assert ran.json["gap"] >= 0


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
