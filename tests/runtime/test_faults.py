"""When things go wrong: every kind of end, in every kind of action, told once and in time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_jobs as jobs
import psutil
import pytest
from ranks import Outcome, run_outcomes, run_ranks

pytestmark = pytest.mark.slow
PATIENCE_S = 100.0
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


@dataclass(frozen=True)
class Group:
    """Some ranks with a job of their own; lost: those that are stopped."""

    job: Callable[..., Any]
    arguments: tuple[Any, ...]
    ranks: int = 2
    lost: Sequence[int] = ()

    def run(self) -> list[Outcome]:
        return run_outcomes(
            self.job, self.ranks, *self.arguments, lost=self.lost, timeout_s=PATIENCE_S
        )


def together(groups: Sequence[Group]) -> list[list[Outcome]]:
    """All groups at once: they mostly wait."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(Group.run, groups))


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
    gate, processes = tmp_path / "gate", 2 * len(jobs.KINDS) + 4
    gate.mkdir()

    def group(kind: str, victim: int, *more: Any, ranks: int = 2) -> Group:
        note = tmp_path / f"{kind}-{ranks}"
        lost = [victim] if how == "stopped" else []
        return Group(jobs.struck, (kind, how, note, gate, processes, ranks, *more), ranks, lost)

    groups = [group(kind, victim) for kind, (_, victim, _) in jobs.KINDS.items()]
    *pairs, four = together([*groups, group("F", 1, ("1f1b", 5, None), ranks=4)])
    for (kind, (_, victim, _)), outcomes in zip(jobs.KINDS.items(), pairs, strict=True):
        first, *story = assert_told(outcomes, victim, how, kind)
        assert " or before of step 2: " in first or " in an action after 0F2 of step 2: " in first
        assert story[2 - victim].startswith(f"  rank {1 - victim}: ")
    assert_told(four, 1, how, "F of four ranks")
    folder = tmp_path / "F-4.d" / "step_0000002"
    assert {path.name for path in folder.iterdir()} == {
        *("story.txt", "rank0.json", "rank2.json", "rank3.json")
    }


def test_a_rank_that_is_lost_before_its_receives_are_posted_is_named(tmp_path: Path) -> None:
    """Whoever posts them has to do with another rank first, which is not to blame."""
    victims = (1, 3)
    groups = [Group(jobs.lost_before_receives, (v, tmp_path / str(v)), 4) for v in victims]
    for victim, outcomes in zip(victims, together(groups), strict=True):
        assert_told(outcomes, victim, "killed", "nothing yet")


def assert_told(outcomes: list[Outcome], victim: int, how: str, where: str) -> list[str]:
    """Every survivor tells the same in time, and names the victim; returns the lines of it."""
    assert outcomes[victim].died == -9, outcomes
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for survivor in survivors:
        assert survivor.error is None, survivor.trace
        assert survivor.value["after_s"] < STOP_S + (jobs.TIMEOUT_S if how == "stopped" else 0.0)
    assert len({survivor.value["error"] for survivor in survivors}) == 1
    first, *story = survivors[0].value["error"].splitlines()
    assert first.startswith(f"rank {victim} failed in "), first
    why = "died without a word" if how == "killed" else "no sign of life within timeout_s"
    assert why in first
    assert story[victim + 1].startswith(f"> rank {victim}: has left no word; ")
    print(f"{how} in {where}: {max(s.value['after_s'] for s in survivors):.2f} s")
    return [first, *story]


def test_the_watchdog_says_who_waits_for_whom(tmp_path: Path) -> None:
    stopped, slow, hangs = together(
        [
            Group(jobs.stalls, ("stopped", tmp_path, 6), lost=[1]),
            Group(jobs.stalls, ("slow", tmp_path, 6)),
            Group(jobs.stalls, ("hangs", tmp_path, 6), lost=[1]),
        ]
    )
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
