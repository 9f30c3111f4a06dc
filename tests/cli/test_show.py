"""`fullbore show`: the terminal grid and every file format."""

from __future__ import annotations

import json

import pytest

from fullbore import Schedule, schedules
from fullbore.ir import from_text

ONE = ("show", "1f1b", "-p", 2, "-m", 4)


def test_the_grid_has_a_row_a_rank_and_the_figures_beneath(fullbore):
    said = fullbore(*ONE, "--width", 100).out
    assert "rank 0  F0" in said
    assert "rank 1  " in said
    assert "bubble fraction   20.0 %" in said
    assert all(len(line) <= 100 for line in said.splitlines())


def test_a_dash_prints_csv_alone(fullbore):
    ran = fullbore(*ONE, "-o", "-")
    assert ran.out.splitlines() == [
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3",
        "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
    ]
    assert ran.err == ""


def test_communication_can_be_written_out(fullbore):
    schedule = from_text(fullbore(*ONE, "--communication", "-o", "-").out)
    assert schedule.has_communication
    assert not from_text(fullbore(*ONE, "-o", "-").out).has_communication


def test_csv_files_travel_back(fullbore, tmp_path):
    file = tmp_path / "schedule.csv"
    ran = fullbore(*ONE, "-o", file)
    assert ran.err == f"wrote {file}\n"
    assert Schedule.from_csv(file) == schedules.one_f_one_b(ranks=2, microbatches=4)


@pytest.mark.parametrize(
    ("ending", "opening"), [("svg", b"<svg"), ("html", b"<!doctype html>"), ("json", b"{")]
)
def test_pictures_are_written(fullbore, tmp_path, ending, opening):
    file = tmp_path / f"picture.{ending}"
    assert fullbore(*ONE, "-o", file).status == 0
    assert opening in file.read_bytes()[:200].lower()


def test_a_trace_is_written(fullbore, tmp_path):
    file = tmp_path / "trace.pftrace"
    assert fullbore(*ONE, "-o", file).status == 0
    assert b"1F3" in file.read_bytes()


def test_the_picture_counts_bytes_where_the_costs_do(fullbore, tmp_path):
    costs = tmp_path / "costs.json"
    stage = {"forward_s": 1, "backward_s": 2, "activation_bytes": 3 * 2**20}
    costs.write_text(json.dumps({"stages": [stage, stage]}))
    fullbore(*ONE, "--costs", costs, "-o", tmp_path / "picture.svg")
    assert "6 MiB" in (tmp_path / "picture.svg").read_text()


def test_json_has_every_span(fullbore, tmp_path):
    printed = fullbore(*ONE, "--json").json
    fullbore(*ONE, "-o", tmp_path / "spans.json")
    assert printed == json.loads((tmp_path / "spans.json").read_text())
    computes = [span for span in printed["spans"] if "SEND" not in span["action"]]
    assert {"rank": 0, "action": "0F0", "start_s": 0, "end_s": 1} in computes
    assert sum(span["action"][1] in "FB" for span in printed["spans"]) == 2 * 2 * 4


def test_endings_are_told_apart_whatever_their_case(fullbore, tmp_path):
    assert fullbore(*ONE, "-o", tmp_path / "PICTURE.SVG").status == 0
    assert fullbore(*ONE, "-o", tmp_path / "picture").status == 2


def test_json_is_printed_beside_a_csv_file(fullbore, tmp_path):
    ran = fullbore(*ONE, "--hop-s", 1, "-o", tmp_path / "schedule.csv", "--json")
    assert (
        ran.json["makespan_s"]
        == fullbore("simulate", *ONE[1:], "--hop-s", 1, "--json").json["makespan_s"]
    )
    assert (tmp_path / "schedule.csv").exists()


@pytest.mark.parametrize("ending", ["svg", "html", "json", "pftrace"])
def test_a_file_name_in_no_encoding_can_be_drawn(fullbore, tmp_path, ending):
    odd = tmp_path / "odd\udcff.csv"
    schedules.one_f_one_b(ranks=2, microbatches=4).to_csv(odd)
    ran = fullbore("show", odd, "-o", tmp_path / f"picture.{ending}")
    assert ran.status == 0, ran.err


def test_a_terminal_without_colour_gets_letters(fullbore, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "rank 0  F0" not in fullbore(*ONE).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "rank 0  F0" in fullbore(*ONE).out


def test_one_of_a_thing_is_not_called_many(fullbore):
    assert "gpipe: 1 rank, 1 microbatch\n" in fullbore("show", "gpipe", "-p", 1, "-m", 1).out


def test_a_schedule_that_offloads_goes_to_csv_and_back(fullbore, tmp_path):
    file = tmp_path / "away.csv"
    fullbore("show", "gpipe", "-p", 2, "-m", 4, "--offload", 1, "-o", file)
    assert "0F0,0OFFLOAD0,0F1" in file.read_text()
    assert "obeys every law" in fullbore("check", file, "--peak-limit", 2).out
    assert fullbore("check", file, "--peak-limit", 1).status == 1
    picture = tmp_path / "away.svg"
    fullbore("show", file, "--offload-s", 0.5, "-o", picture)
    said = picture.read_text()
    assert "copy to the host" in said and "<title>0OFFLOAD0: 1 to 1.5 s</title>" in said


def test_slack_stands_in_the_grid_and_in_json(fullbore):
    drawn = fullbore("show", "1f1b", "-p", 2, "-m", 2, "--slack").out.splitlines()
    assert any("F!- F+2 ....... B+1---- ... B!-----" in line for line in drawn)
    assert any("! critical" in line and "+x may end x s later" in line for line in drawn)
    found = fullbore("show", "1f1b", "-p", 2, "-m", 2, "--slack", "--json").json
    slips = {span["action"]: span["slack_s"] for span in found["spans"]}
    assert (slips["0F0"], slips["0F1"], slips["0B0"]) == (0.0, 2.0, 1.0)
    assert fullbore("show", "1f1b", "-p", 2, "-m", 2, "--slack", "-o", "a.svg").status == 2
