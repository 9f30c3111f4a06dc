"""When things go wrong: every kind of end, in every kind of action, told once and in time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fault_jobs as jobs
import psutil
import pytest
from ranks import Outcome, run_outcomes, run_ranks

pytestmark = pytest.mark.slow
STOP_S = 5.0  # within which every rank stops


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process of a test outlives it."""
    before = _processes()
    yield
    left = [p for p in _processes() - before if "forkserver" not in " ".join(p.cmdline())]
    assert not [p for p in left if p.is_running() and "resource_tracker" not in str(p.cmdline())]


def _processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def together(jobs_to_run: list[tuple[object, ...]]) -> list[list[Outcome]]:
    """Several groups of two ranks at once: they mostly wait."""
    with ThreadPoolExecutor(len(jobs_to_run)) as pool:
        waiting = [
            pool.submit(run_outcomes, job, 2, *args, lost=lost, timeout_s=90)  # type: ignore
            for job, lost, *args in jobs_to_run
        ]
        return [one.result() for one in waiting]


def test_whatever_is_raised_wherever_is_told_everywhere_and_leaves_nothing(tmp_path: Path) -> None:
    cases = [(kind, "ValueError") for kind in jobs.KINDS]
    cases += [(kind, "OutOfMemoryError") for kind in ("F", "I", "W", "B", "RECV_B")]
    cases += [(kind, "MemoryError") for kind in ("F", "I", "W")]
    cases += [(kind, "RuntimeError") for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")]
    found = run_ranks(jobs.raising, 2, cases, tmp_path, timeout_s=90)
    for (kind, name), *told in zip(cases, *found, strict=True):
        _, victim, action = jobs.KINDS[kind]
        for one in told:
            first, *story = one["error"].splitlines()
            assert first == (
                f"rank {victim} failed in {action} of step {one['step']}: {name}: on purpose"
            )
            assert story[0] == "last actions of every rank, the one in hand behind the bar:"
            assert story[victim + 1].startswith(f"> rank {victim}: ")
            assert f" | {action}" in story[victim + 1]
            assert story[2 - victim].startswith(f"  rank {1 - victim}: ")
            assert one["wrong"] == []
            assert one["took_s"] < STOP_S
        assert told[0]["error"] == told[1]["error"]


def test_flight_records_say_what_the_message_says(tmp_path: Path) -> None:
    told = run_ranks(jobs.raising, 2, [("F", "ValueError")], tmp_path)[0][0]["error"]
    folder = tmp_path / "1f1b" / "step_0000001"
    assert told.splitlines()[-1] == f"flight records: {folder}"
    assert (folder / "story.txt").read_text() == told + "\n"
    first, last = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert last["action"] == "1F1" and last["error"] == "ValueError: on purpose"
    assert last["done"][-2:] == ["1SEND_B0", "1RECV_F1"] and last["coming"][0] == "1B1"
    assert last["got"] == {"0": "0F1"}
    assert first["waits_for"] == 1 and first["error"] and first["pid"] != last["pid"]
    assert first["action"] in ("0RECV_B0", "0SEND_F2", "0RECV_B1")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_lost_in_any_action_is_named_in_time(how: str, tmp_path: Path) -> None:
    work = [
        (jobs.struck, [jobs.KINDS[kind][1]] if how == "stopped" else [], kind, how, tmp_path / kind)
        for kind in jobs.KINDS
    ]
    for kind, outcomes in zip(jobs.KINDS, together(work), strict=True):
        victim = jobs.KINDS[kind][1]
        assert outcomes[victim].died == -9
        survivor = outcomes[1 - victim]
        assert survivor.error is None, survivor.trace
        first, *story = survivor.value["error"].splitlines()
        assert first.startswith(f"rank {victim} failed in "), first
        assert " or before of step 2: " in first or " in an action after 0F2 of step 2: " in first
        why = "died without a word" if how == "killed" else "no sign of life within timeout_s"
        assert why in first
        assert story[victim + 1].startswith(f"> rank {victim}: has left no word; ")
        assert story[2 - victim].startswith(f"  rank {1 - victim}: ")
        assert survivor.value["after_s"] < STOP_S + (jobs.TIMEOUT_S if how == "stopped" else 0.0)
        print(f"{how} in {kind}: {survivor.value['after_s']:.2f} s")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_of_four_ranks_all_name_the_lost_one_alike(how: str, tmp_path: Path) -> None:
    outcomes = run_outcomes(
        *(jobs.struck, 4, "F", how, tmp_path / "note", 4, ("1f1b", 5, None)),
        lost=[1] if how == "stopped" else [],
    )
    told = [outcome.value for rank, outcome in enumerate(outcomes) if rank != 1]
    assert len({one["error"] for one in told}) == 1
    assert told[0]["error"].startswith("rank 1 failed in ")
    for one in told:
        assert one["after_s"] < STOP_S + (jobs.TIMEOUT_S if how == "stopped" else 0.0)
        print(f"{how}, four ranks: {one['after_s']:.2f} s")
    folder = tmp_path / "note.d" / "step_0000002"
    assert {path.name for path in folder.iterdir()} == {
        "story.txt",
        "rank0.json",
        "rank2.json",
        "rank3.json",
    }


def test_the_watchdog_says_who_waits_for_whom() -> None:
    work = [
        (jobs.stalls, [1], "stopped"),
        (jobs.stalls, [], "slow"),
        (jobs.stalls, [1], "hangs"),
    ]
    stopped, slow, hangs = together(work)  # type: ignore[arg-type]
    heard = "\n".join(stopped[0].value["heard"])
    assert "step 2 has stood still for " in heard
    assert " in 0RECV_B1 for rank 1 to do 1B1; last known of it: rank 0 last got 1B0" in heard
    assert "rank 1 gives no sign of life: " in heard
    assert "the wait ends after 6 s" in heard
    assert "no sign of life within timeout_s" in stopped[0].value["error"]
    assert [one.value["error"] for one in slow] == [None, None]
    both = "\n".join([*slow[0].value["heard"], *slow[1].value["heard"]])
    assert "rank 1 has been in 1F1 for " in both
    assert hangs[0].value["error"].startswith("rank 1 failed in 1F1 of step 2: it hangs")


def test_a_peer_that_never_comes_is_named() -> None:
    *told, last = run_ranks(jobs.absent, 4, 3)
    assert last == "was not there"
    for one in told:
        assert one.startswith(
            "rank 3 failed in making the pipeline: it did not come within 2 s: was it started"
        )
    assert "for rank 3 to make the pipeline" in told[0]


def test_a_rank_that_closes_alone_is_named_within_seconds() -> None:
    for rank, found in enumerate(run_ranks(jobs.closing, 3, 3)):
        for closer, (error, took_s) in enumerate(found):
            if rank == closer:
                assert "the pipeline is closed" in error
            else:
                assert error.startswith(f"rank {closer} failed in step 2: it closed its pipeline")
                assert took_s < STOP_S
