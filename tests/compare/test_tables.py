"""Rows and notes as they are read, and the JSON document with its promised keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from comparisons import PACED, TRAINED, measurement

from fullbore.cli.output import to_json
from fullbore.compare import Outcome, Setting, assess
from fullbore.compare.document import document
from fullbore.compare.page import page
from fullbore.compare.tables import Pair, columns, headline, peaks_by_rank, rows, stage_costs
from fullbore.cost import Costs

SIDE_KEYS = {
    *("bubble_fraction", "bubble_overhead", "span_bubble_fraction", "makespan_s", "step_s", "mfu"),
    *("peak_activations", "peak_activation_bytes", "busy_s", "idle_s", "warmup_idle_s"),
    *("steady_idle_s", "cooldown_idle_s", "imbalance_s"),
}


def outcomes(setting: Setting = TRAINED, *names: str, **options: object) -> list[Outcome]:
    chosen = names or ("gpipe", "1f1b", "interleaved")
    return [
        assess(
            measurement(name, setting.ranks, 4, paced=setting.pace is not None, **options), setting
        )
        for name in chosen
    ]


def test_a_pair_has_one_unit():
    pair = Pair(measured="21.3", predicted="20.9", unit="%")
    assert str(pair) == "21.3 / 20.9 %"
    assert pair.cells == ("21.3 %", "20.9 %")
    assert str(Pair(measured="4", predicted="4", unit="")) == "4 / 4"


def test_rows_of_a_training_job():
    found = rows(outcomes())
    assert [row.schedule for row in found] == ["gpipe", "1f1b", "interleaved v=2"]
    assert [row.change for row in found[:1]] == ["–"]
    assert all(row.change[0] in "+−" and row.change.endswith(" %") for row in found[1:])
    assert {row.loss for row in found} == {"2.000"}
    assert {row.held_out for row in found} == {"2.750 → 2.125"}
    assert [row.peak.unit for row in found] == ["KiB"] * 3  # one unit for all schedules
    assert [row.peak.measured for row in found[:2]] == ["7.81", "1.95"]  # 4 x 2000, 2 x 1000


def test_a_run_that_was_stopped_has_no_loss_after_it():
    (outcome,) = outcomes(TRAINED, "gpipe", held_out_after=None, complete=False)
    assert rows([outcome])[0].held_out == "2.750 → –"


def test_paced_rows_have_no_columns_of_training():
    assert list(columns(PACED)) == ["bubble", "peak", "step", "change"]
    assert len(columns(TRAINED)) == 7
    found = rows(outcomes(PACED))
    assert [str(row.peak) for row in found] == ["4 / 4", "4 / 4", "4 / 4"]
    assert {row.mfu for row in found} == {row.loss for row in found} == {"–"}


def test_peaks_of_each_rank():
    assert [[str(p) for p in peaks] for peaks in peaks_by_rank(outcomes(TRAINED, "1f1b"))] == [
        ["1.95 / 1.95 KiB", "1.95 / 1.95 KiB"]
    ]


def test_costs_of_equal_stages_are_told_once():
    outcome = outcomes(TRAINED, "gpipe")[0]
    equal = replace(outcome, costs=Costs.uniform(stages=2, forward_s=0.01, hop_s=5e-5))
    first, second = stage_costs([equal, outcome])
    assert first == ("0.01 s each", "2 s each", "50 µs", "0 s")
    assert second[1] == "1.1, 1.65 s"


def test_headline():
    assert headline(TRAINED) == (
        "Tiny, 4 layers on 2 ranks, 4 microbatches a step; 3 steps measured after 1 of warm-up"
    )
    blocking = replace(PACED, overlap=False, steps=2)
    assert headline(blocking) == (
        "paced stages on 8 ranks, 4 microbatches a step, communication not overlapped; 1 step "
        "measured after 1 of warm-up"
    )


def test_the_document_has_the_promised_keys():
    made = json.loads(to_json(document(TRAINED, outcomes())))
    assert {"ranks", "microbatches", "complete", "paced", "warnings", "peak_flops"} <= made.keys()
    assert made["bubble_definition"] == "idle / (ranks * makespan)"
    assert made["complete"] is True and made["paced"] is False
    gpipe, _, interleaved = made["schedules"]
    assert gpipe["measured"].keys() == gpipe["predicted"].keys() == SIDE_KEYS
    slower = interleaved["measured"]["step_s"] / gpipe["measured"]["step_s"]
    assert gpipe["change_percent"] == 0
    assert interleaved["change_percent"] == pytest.approx(100 * (slower - 1))
    assert gpipe["losses"] == [2.5, 2.25, 2.0]
    assert (gpipe["held_out_loss_before"], gpipe["held_out_loss_after"]) == (2.75, 2.125)
    assert len(gpipe["steps"]) == 3 and gpipe["costs_file"] == "costs-gpipe.json"
    assert len(Costs.parse(interleaved["costs"]).stages) == 4


def test_every_key_of_the_document_is_documented():
    made = document(TRAINED, outcomes())
    row = made["schedules"][0]
    text = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    for key in {*made, *row, *row["measured"], *row["steps"][0]}:
        assert f"`{key}`" in text, key


def test_the_document_of_a_paced_run_has_nulls():
    made = document(PACED, outcomes(PACED, "1f1b"))
    assert made["paced"] is True and made["model"] is None and made["flops_per_step"] is None
    side = made["schedules"][0]["measured"]
    assert side["mfu"] is None and side["peak_activation_bytes"] is None


def test_an_unfinished_run_says_so_everywhere():
    found = outcomes(TRAINED, "gpipe", complete=False)
    assert document(TRAINED, found)["complete"] is False
    assert "Stopped early: gpipe" in page(TRAINED, found)


def test_the_page_has_both_panels_of_each_schedule_and_says_how():
    text = page(TRAINED, outcomes())
    for name in ("gpipe", "1f1b", "interleaved v=2"):
        assert f"<h2>{name}, predicted</h2>" in text
        assert f"<h2>{name}, measured</h2>" in text
    assert text.index("gpipe, predicted") < text.index("gpipe, measured")
    assert "Bubble fraction is idle / (ranks × makespan)" in text
    assert "3 TFLOP of the model a step (matrices only)" in text
    assert "the same loss, to the last bit" in text
    assert "by up to" in text


def test_a_schedule_without_a_prediction_has_its_measured_half():
    gpipe, whole = outcomes(TRAINED, "gpipe", "1f1b")
    found = [gpipe, replace(whole, costs=None, predicted=None, problem="CostsError: no")]
    row = rows(found)[1]
    assert str(row.step).endswith(" / – s") and row.peak.predicted == "–"
    assert row.bubble.cells[0].endswith(" %") and row.bubble.cells[1] == "–"
    assert stage_costs(found)[1] == ("–",) * 4
    text = page(TRAINED, found)
    assert "<h2>1f1b, measured</h2>" in text and "<h2>1f1b, predicted</h2>" not in text
    assert "1f1b could not be predicted: CostsError: no." in text
    first, second = json.loads(to_json(document(TRAINED, found)))["schedules"]
    assert first["problem"] is None and first["measured"].keys() == second["measured"].keys()
    assert second["predicted"] is second["costs"] is second["costs_file"] is None
    assert second["problem"] == "CostsError: no"


def test_a_loss_that_is_no_number_is_null_in_the_document():
    found = outcomes(TRAINED, "gpipe", held_out_after=float("nan"), losses=(2.5, float("inf")))
    (row,) = json.loads(to_json(document(TRAINED, found)))["schedules"]
    assert row["held_out_loss_after"] is None and row["losses"] == [2.5, None]


def test_losses_that_differ_are_told_apart():
    found = outcomes(TRAINED, "gpipe") + outcomes(TRAINED, "1f1b", losses=(2.5, 2.25, 2.002))
    assert "at most 1.0e-03 (relative) apart" in page(TRAINED, found)


def test_the_page_of_a_paced_run_says_what_busy_means():
    text = page(PACED, outcomes(PACED))
    assert "busy for its nominal time" in text
    assert "Every stage sleeps" in text
    assert ">MFU<" not in text and ">MFU<" in page(TRAINED, outcomes())


@pytest.mark.parametrize("cores, said", [(1, "4 ranks share 1 core:"), (2, "share 2 cores:")])
def test_a_warning_stands_in_page_and_document(cores, said):
    setting = replace(TRAINED, ranks=4, cores=cores)
    found = outcomes(setting, "gpipe")
    assert said in page(setting, found)
    (warning,) = document(setting, found)["warnings"]
    assert said in warning and "--paced" in warning
