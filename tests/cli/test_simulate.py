"""`fullbore simulate`: the figures of FACTS' table, from flags, costs files and CSV files."""

from __future__ import annotations

import json

import pytest

from fullbore import Timeline, schedules
from fullbore.schedules import FAMILIES

KEYS = {
    *("slices", "copies"),
    *("schedule", "ranks", "virtual_stages", "stages", "microbatches", "stage_to_rank", "overlap"),
    *("makespan_s", "bubble_fraction", "bubble_overhead", "span_bubble_fraction"),
    *("peak_activations", "peak_activation_bytes", "busy_s", "idle_s", "warmup_idle_s"),
    *("steady_idle_s", "cooldown_idle_s", "imbalance_s", "critical_path"),
}


def test_json_has_the_documented_keys(fullbore):
    assert set(fullbore("simulate", "gpipe", "-p", 2, "-m", 4, "--json").json) == KEYS


@pytest.mark.parametrize(
    ("name", "v", "peak"), [("gpipe", 1, 16), ("1f1b", 1, 8), ("interleaved", 2, 11.5)]
)
def test_bubble_idle_and_peak_are_exact(fullbore, name, v, peak):
    p, m = 8, 16
    flags = ["-v", v] if v > 1 else []
    found = fullbore("simulate", name, "-p", p, "-m", m, *flags, "--json").json
    assert found["schedule"] == name
    assert (found["ranks"], found["virtual_stages"], found["microbatches"]) == (p, v, m)
    assert found["bubble_fraction"] == pytest.approx((p - 1) / (v * m + p - 1))
    assert found["bubble_overhead"] == pytest.approx((p - 1) / (v * m))
    assert found["idle_s"] == pytest.approx([(p - 1) * 3] * p)
    assert found["makespan_s"] == pytest.approx((v * m + p - 1) * 3)
    assert max(found["peak_activations"]) == peak
    assert len(found["peak_activations"]) == p


def test_megatrons_long_flags_mean_the_same(fullbore):
    short = fullbore("simulate", "interleaved", "-p", 2, "-m", 6, "-v", 3, "-g", 3, "--json")
    long = fullbore(
        *("simulate", "interleaved"),
        *("--pipeline-model-parallel-size", 2),
        *("--num-microbatches", 6),
        *("--num-virtual-stages-per-pipeline-rank", 3),
        *("--microbatch-group-size-per-virtual-pipeline-stage", 3),
        "--json",
    )
    assert short.json == long.json
    assert short.json["virtual_stages"] == 3


def test_the_halves_of_the_backward_add_up(fullbore):
    whole = fullbore("simulate", "1f1b", "-p", 4, "-m", 8, "--backward-s", 5, "--json").json
    halves = fullbore(
        *("simulate", "1f1b", "-p", 4, "-m", 8),
        *("--input-grad-s", 3, "--weight-grad-s", 2, "--json"),
    ).json
    assert halves["makespan_s"] == whole["makespan_s"] == pytest.approx((8 + 3) * 6)


def test_a_hop_costs_what_the_formula_says(fullbore):
    p, m, c = 4, 8, 0.01
    without = fullbore("simulate", "1f1b", "-p", p, "-m", m, "--json").json
    with_hops = fullbore("simulate", "1f1b", "-p", p, "-m", m, "--hop-s", c, "--json").json
    added = with_hops["makespan_s"] - without["makespan_s"]
    assert added == pytest.approx(2 * c * ((p - 1) * m / p + p - 2))


def test_without_overlap_messages_cost_more(fullbore):
    flags = ("simulate", "1f1b", "-p", 4, "-m", 8, "--hop-s", 0.1, "--json")
    blocked = fullbore(*flags, "--no-overlap").json
    assert blocked["overlap"] is False
    assert blocked["makespan_s"] > fullbore(*flags).json["makespan_s"]


def test_a_costs_file_gives_each_stage_its_own(fullbore, tmp_path):
    file = tmp_path / "costs.json"
    stage = {"forward_s": 1, "backward_s": 2, "activation_bytes": 100}
    file.write_text(json.dumps({"stages": [stage, {**stage, "forward_s": 3}]}))
    found = fullbore("simulate", "1f1b", "-p", 2, "-m", 4, "--costs", file, "--json").json
    assert found["busy_s"] == [12, 20]
    assert found["imbalance_s"] == [8, 0]
    assert found["peak_activation_bytes"] == [200, 100]


def test_a_costs_file_and_flags_contradict_each_other(fullbore, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"stages": [{"forward_s": 1, "backward_s": 2}] * 2}))
    ran = fullbore("simulate", "1f1b", "-p", 2, "-m", 4, "--costs", file, "--hop-s", 1)
    assert ran.status == 2
    assert "leave --hop-s out" in ran.err


def test_costs_for_another_number_of_stages_are_refused(fullbore, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"stages": [{"forward_s": 1, "backward_s": 2}] * 3}))
    ran = fullbore("simulate", "1f1b", "-p", 2, "-m", 4, "--costs", file)
    assert ran.status == 2
    assert "3 stages" in ran.err
    assert "2" in ran.err


def test_a_csv_file_is_a_schedule_too(fullbore, tmp_path):
    file = tmp_path / "mine.csv"
    schedules.interleaved(ranks=2, microbatches=4, virtual_stages=2).to_csv(file)
    found = fullbore("simulate", file, "--json").json
    named = fullbore("simulate", "interleaved", "-p", 2, "-m", 4, "-v", 2, "--json").json
    assert found.pop("schedule") == "mine"
    assert named.pop("schedule") == "interleaved"
    assert found == named


@pytest.mark.parametrize(
    ("flag", "value", "remedy"), [("-p", 3, "write 2"), ("-m", 5, "write 4"), ("-g", 4, "leave")]
)
def test_flags_cannot_change_what_a_file_says(fullbore, tmp_path, flag, value, remedy):
    file = tmp_path / "mine.csv"
    schedules.gpipe(ranks=2, microbatches=4).to_csv(file)
    assert fullbore("simulate", file, "-p", 2, "-m", 4).status == 0
    ran = fullbore("simulate", file, flag, value)
    assert ran.status == 2
    assert f"{flag} {value} does not fit" in ran.err
    assert remedy in ran.err


def test_a_file_that_breaks_a_law_is_not_simulated(fullbore, tmp_path):
    file = tmp_path / "broken.csv"
    file.write_text("0B0,0F0\n")
    ran = fullbore("simulate", file)
    assert ran.status == 2
    assert "0B0" in ran.err


def test_people_read_every_bubble_with_its_definition(fullbore):
    said = fullbore("simulate", "gpipe", "-p", 4, "-m", 8, "--hop-s", 0.5).out
    assert "bubble fraction" in said
    assert "idle / (ranks × makespan)" in said
    assert "idle / busy" in said
    assert "longest span of one rank" in said
    assert len([line for line in said.splitlines() if line[:1].isdigit()]) == 4


def test_the_critical_path_lasts_as_long_as_the_step(fullbore):
    found = fullbore("simulate", "1f1b", "-p", 4, "-m", 8, "--hop-s", 0.25, "--json").json
    path = found["critical_path"]
    assert path[-1]["end_s"] == found["makespan_s"]
    computing_s = sum(
        span["end_s"] - span["start_s"]
        for span in path
        if "SEND" not in span["action"] and "RECV" not in span["action"]
    )
    hops = sum("SEND" in span["action"] for span in path)
    assert computing_s + 0.25 * hops == pytest.approx(found["makespan_s"])


def test_a_long_critical_path_does_not_go_through_the_timeline_again(fullbore, monkeypatch):
    looks = []
    look = Timeline.is_compute.fget
    monkeypatch.setattr(Timeline, "is_compute", property(lambda t: looks.append(1) or look(t)))
    fullbore("simulate", "1f1b", "-p", 2, "-m", 4)
    few = len(looks)
    fullbore("simulate", "1f1b", "-p", 2, "-m", 64)
    assert len(looks) == 2 * few


def test_what_leaves_for_the_host(fullbore):
    job = ("1f1b", "-p", 4, "-m", 8, "--offload", 1)
    plain = fullbore("simulate", *job[:-2], "--json").json
    found = fullbore("simulate", *job, "--offload-s", 0.5, "--json").json
    assert found["makespan_s"] == plain["makespan_s"]
    assert (plain["peak_activations"], found["peak_activations"]) == ([4, 3, 2, 1], [2, 2, 2, 1])
    early = fullbore("simulate", *job, "--offload-ahead", 3, "--offload-s", 0.5, "--json").json
    assert early["peak_activations"][0] > 2
    slow = fullbore("simulate", *job, "--offload-s", 2, "--json").json
    assert slow["makespan_s"] > plain["makespan_s"]
    copies = ("OFFLOAD", "RELOAD")
    assert any(kind in span["action"] for span in slow["critical_path"] for kind in copies)
    assert (
        "s of communication, copies and host time"
        in fullbore("simulate", *job, "--offload-s", 2).out
    )


def test_bytes_that_leave_come_from_a_costs_file(fullbore, tmp_path):
    stage = {"forward_s": 1, "backward_s": 2, "activation_bytes": 100, "offload_bytes": 90}
    costs = {"stages": [stage] * 2, "offload_bytes_per_s": 180}
    (tmp_path / "costs.json").write_text(json.dumps(costs))
    job = ("gpipe", "-p", 2, "-m", 4, "--costs", tmp_path / "costs.json", "--json")
    assert fullbore("simulate", *job).json["peak_activation_bytes"] == [400, 400]
    found = fullbore("simulate", *job, "--offload", 1, "--offload-ahead", 0).json
    assert found["peak_activation_bytes"][0] == 200 + 2 * 10  # a copy lasts half a forward


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--offload", 1), "0OFFLOAD0, and nothing says how long that takes: give offload_s"),
        (("--offload-ahead", 1), "--offload-ahead says when what --offload sends away comes back"),
        (("--offload", 0), "--offload"),
    ],
)
def test_offload_that_makes_no_sense_is_refused(fullbore, flags, said):
    ran = fullbore("simulate", "gpipe", "-p", 2, "-m", 4, *flags)
    assert ran.status == 2 and said in ran.err and ran.out == ""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_schedule_is_simulated_and_shown_with_no_costs_typed(fullbore, family):
    said = fullbore("simulate", family.name, "-p", 4, "-m", 8)
    assert said.status == 0 and f"{family.name}: 4 ranks" in said.out
    shown = fullbore("show", family.name, "-p", 4, "-m", 8, "--width", 120)
    assert shown.status == 0 and "rank 3" in shown.out


def test_half_of_a_backward_is_i_where_only_the_whole_was_typed(fullbore):
    short = fullbore("simulate", "zb-v", "-p", 4, "-m", 8, "--backward-s", 3, "--json").json
    long = fullbore(
        *("simulate", "zb-v", "-p", 4, "-m", 8),
        *("--input-grad-s", 1.5, "--weight-grad-s", 1.5, "--json"),
    ).json
    assert short == long


def test_slices_and_copies_are_said(fullbore):
    sliced = fullbore("simulate", "seq1f1b", "-p", 2, "-m", 3)
    assert "seq1f1b: 2 ranks, 3 microbatches × 4 slices" in sliced.out
    both = fullbore("simulate", "dualpipe", "-p", 2, "-m", 3, "--json").json
    assert both["stage_to_rank"] == [0, 1] and both["copies"] == [[1, 0]]


def test_jitter_gives_the_distribution_of_the_makespan(fullbore):
    told = ("simulate", "1f1b", "-p", 4, "-m", 8, "--jitter", 0.1, "--samples", 50, "--seed", 7)
    found = fullbore(*told, "--json").json
    assert set(found) == KEYS | {"jitter"}
    varied = found["jitter"]
    assert (varied["jitter"], varied["samples"], varied["seed"]) == (0.1, 50, 7)
    assert len(varied["makespans_s"]) == 50
    assert varied["p50_s"] <= varied["p90_s"] <= varied["p99_s"] <= max(varied["makespans_s"])
    assert found["makespan_s"] < varied["p90_s"]
    assert fullbore(*told, "--json").json == found
    assert "with jitter       mean 34" in fullbore(*told).out


def test_a_jitter_that_is_none_is_refused(fullbore):
    ran = fullbore("simulate", "gpipe", "-p", 2, "-m", 2, "--jitter", -1)
    assert ran.status == 2
    assert "jitter of -1" in ran.err
    ran = fullbore("simulate", "gpipe", "-p", 2, "-m", 2, "--samples", 20)
    assert ran.status == 2 and "add --jitter" in ran.err


def test_slices_of_sequences(fullbore):
    """k slices fill the pipeline as k times the microbatches would: (P-1)/(kM+P-1) idle."""
    found = fullbore("simulate", "seq1f1b", "-p", 4, "-m", 3, "--slices", 2, "--json").json
    assert (found["microbatches"], found["slices"]) == (3, 2)
    assert found["bubble_fraction"] == pytest.approx(3 / (2 * 3 + 3))
    refused = fullbore("simulate", "1f1b", "-p", 4, "-m", 3, "--slices", 2)
    assert refused.status == 2 and "choose seq1f1b" in refused.err
