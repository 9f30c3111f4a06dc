"""`fullbore check`: 0 where a file obeys every law, 1 with the violations, 2 where it is none."""

from __future__ import annotations

import pytest

from fullbore import passes, schedules


def test_a_schedule_of_ours_obeys_every_law(fullbore, tmp_path):
    file = tmp_path / "schedule.csv"
    schedules.looped_bfs(ranks=4, microbatches=3, virtual_stages=2).to_csv(file)
    ran = fullbore("check", file)
    assert ran.status == 0
    assert ran.out == f"{file}: obeys every law (4 ranks, 8 stages, 3 microbatches, 48 actions)\n"


def test_so_it_does_with_sends_and_receives(fullbore, tmp_path):
    file = tmp_path / "schedule.csv"
    schedule = schedules.interleaved(ranks=4, microbatches=8, virtual_stages=2)
    passes.insert_communication(schedule).to_csv(file)
    found = fullbore("check", file, "--blocking-sends", "--json").json
    assert found["ok"] is True
    assert found["has_communication"] is True


def test_a_violation_names_rank_index_action_rule_and_remedy(fullbore, tmp_path):
    file = tmp_path / "broken.csv"
    file.write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    ran = fullbore("check", file, "--json")
    assert ran.status == 1
    assert ran.json["ok"] is False
    violation = ran.json["violations"][0]
    assert set(violation) == {"rank", "index", "action", "rule", "detail", "remedy"}
    assert violation["rank"] == 0
    assert violation["action"] == "0B1"
    printed = fullbore("check", file)
    assert printed.status == 1
    assert "0B1" in printed.out


def test_a_memory_limit_is_a_law(fullbore, tmp_path):
    file = tmp_path / "gpipe.csv"
    schedules.gpipe(ranks=2, microbatches=4).to_csv(file)
    assert fullbore("check", file, "--peak-limit", 4).status == 0
    assert fullbore("check", file, "--peak-limit", 3.5).status == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("0F0,nonsense\n", "garbage.csv: line 1, column 2"),
        ("0F0\n1F0,,2X2\n", "line 2, column 3"),
    ],
)
def test_garbage_is_refused_with_its_place(fullbore, tmp_path, text, message):
    file = tmp_path / "garbage.csv"
    file.write_text(text)
    ran = fullbore("check", file)
    assert ran.status == 2
    assert ran.out == ""
    assert message in ran.err
