"""The costs file: what is read, what is derived, and what is refused by name."""

from __future__ import annotations

import json

import pytest

from fullbore.cost import Costs, StageCosts
from fullbore.errors import CostsError

STAGE = {"forward_s": 1.0, "backward_s": 2.0}
WHOLE = {
    "stages": [
        {"forward_s": 1, "input_grad_s": 1.5, "weight_grad_s": 0.5, "activation_bytes": 4e6,
         "input_grad_held_bytes": 1e6},
        {"forward_s": 2, "backward_s": 4},
    ],
    "hop_s": 1e-5,
    "message_bytes": 65536,
    "bandwidth_bytes_per_s": 6.5536e9,
    "overhead_s": 0.001,
}  # fmt: skip


def test_a_whole_file_is_read(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(WHOLE))
    costs = Costs.load(file)
    first, second = costs.stages
    assert (first.forward_s, first.input_grad_s, first.weight_grad_s) == (1, 1.5, 0.5)
    assert (first.activation_bytes, first.input_grad_held_bytes) == (4e6, 1e6)
    assert (second.forward_s, second.backward_s) == (2, 4)
    assert (costs.hop_s, costs.overhead_s) == (1e-5, 0.001)
    assert costs.occupancy_s == pytest.approx(1e-5)


def test_saving_and_loading_changes_nothing(tmp_path):
    costs = Costs.parse(WHOLE)
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


def test_a_backward_is_the_sum_of_its_halves():
    stage = Costs.parse(WHOLE).stages[0]
    assert stage.backward_s == 2.0
    assert stage.is_split


def test_a_measured_backward_may_differ_from_its_halves():
    stage = StageCosts(forward_s=1, backward_s=1.9, input_grad_s=1, weight_grad_s=1)
    assert stage.backward_s == 1.9


def test_a_backward_alone_has_no_halves():
    assert not Costs.parse({"stages": [STAGE]}).stages[0].is_split


def test_without_bandwidth_a_message_keeps_no_link_busy():
    assert Costs.parse({"stages": [STAGE], "message_bytes": 1e9}).occupancy_s == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stages": [STAGE], "hops": 1}, r"costs: hops: unknown key; known are stages, hop_s"),
        ({"stages": [STAGE, STAGE | {"foward_s": 1}]}, r"stages\[1\]\.foward_s: unknown key"),
        ({"stages": [{"backward_s": 1}]}, r"stages\[0\]\.forward_s: missing key"),
        ({"stages": [{"forward_s": 1}]}, r"stages\[0\]\.backward_s: missing key; give back"),
        ({}, r"costs: stages: missing key"),
        ({"stages": []}, r"stages: .*at least 1"),
        ({"stages": [STAGE | {"forward_s": -1}]}, r"stages\[0\]\.forward_s: .*greater than"),
        ({"stages": [STAGE | {"forward_s": "1"}]}, r"stages\[0\]\.forward_s: .*number"),
        ({"stages": [STAGE | {"forward_s": True}]}, r"stages\[0\]\.forward_s: .*number"),
        ({"stages": [STAGE | {"forward_s": float("nan")}]}, r"stages\[0\]\.forward_s: .*finite"),
        ({"stages": [STAGE | {"weight_grad_s": 1.0}]}, r"stages\[0\]: .*together, or neither"),
        ({"stages": [STAGE | {"input_grad_held_bytes": 1}]}, r"stages\[0\]: .*give both"),
        ({"stages": [STAGE], "bandwidth_bytes_per_s": 0}, r"bandwidth_bytes_per_s: .*greater"),
        ({"stages": [STAGE], "hop_s": -1}, r"hop_s: .*greater than"),
        ([STAGE], r"costs: .*"),
        ({"stages": 3}, r"stages: .*"),
    ],
)  # fmt: skip
def test_what_is_no_costs_file_is_refused_by_name(data, message):
    with pytest.raises(CostsError, match=message):
        Costs.parse(data)


def test_every_fault_is_named_at_once():
    with pytest.raises(CostsError) as refusal:
        Costs.parse({"stages": [{"forward_s": -1, "backwards_s": 2}], "hop": 0})
    named = str(refusal.value)
    for key in ("stages[0].forward_s", "stages[0].backwards_s", "stages[0].backward_s", "hop:"):
        assert key in named


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[" * 100_000, b"1" * 5000])
def test_a_file_that_is_no_json_is_refused_by_path(tmp_path, content):
    file = tmp_path / "costs.json"
    file.write_bytes(content)
    with pytest.raises(CostsError, match=r"costs\.json"):
        Costs.load(file)


def test_a_missing_file_is_refused_by_path(tmp_path):
    with pytest.raises(CostsError, match=r"nowhere\.json"):
        Costs.load(tmp_path / "nowhere.json")


def test_a_file_that_cannot_be_written_is_refused_by_path(tmp_path):
    with pytest.raises(CostsError, match="cannot write costs to"):
        Costs.parse({"stages": [STAGE]}).save(tmp_path / "no" / "such" / "folder.json")


def test_uniform_costs():
    costs = Costs.uniform(stages=3, hop_s=0.5)
    assert len(costs.stages) == 3
    assert {(s.forward_s, s.backward_s, s.is_split) for s in costs.stages} == {(1, 2, False)}
    assert costs.hop_s == 0.5
    halves = Costs.uniform(stages=1, input_grad_s=1.0, weight_grad_s=0.25).stages[0]
    assert (halves.backward_s, halves.is_split) == (1.25, True)


@pytest.mark.parametrize(
    "wrong", [{"stages": 0}, {"forward_s": -1}, {"input_grad_s": 1}, {"hop_s": float("inf")}]
)
def test_impossible_uniform_costs_are_refused(wrong):
    with pytest.raises(CostsError):
        Costs.uniform(**({"stages": 2} | wrong))


def test_costs_do_not_change():
    with pytest.raises(Exception, match="frozen"):
        Costs.uniform(stages=1).hop_s = 3


def test_a_wrong_value_is_told_once():
    with pytest.raises(CostsError) as refused:
        Costs.uniform(stages=1000, forward_s=-1)
    assert str(refused.value).splitlines() == [
        "costs: stages[0].forward_s: Input should be greater than or equal to 0"
    ]
    with pytest.raises(CostsError, match="at least 1 item"):
        Costs.parse({"stages": []})


def test_a_byte_order_mark_is_no_fault(tmp_path):
    file = tmp_path / "costs.json"
    Costs.uniform(stages=2).save(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert Costs.load(file) == Costs.uniform(stages=2)
