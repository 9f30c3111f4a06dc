"""`fullbore schedules`: the table of schedules, for people and programs."""

from __future__ import annotations

from fullbore.schedules import FAMILIES


def test_json_lists_every_schedule_with_the_documented_keys(fullbore):
    found = fullbore("schedules", "--json").json
    assert [entry["name"] for entry in found] == [family.name for family in FAMILIES]
    assert {key for entry in found for key in entry} == {
        *("name", "summary", "bubble_fraction", "bubble_overhead", "peak_activations"),
        *("constraints", "takes_virtual_stages", "takes_group_size", "takes_slices"),
        *("holds", "runs"),
    }


def test_people_read_formulas_and_what_the_letters_mean(fullbore):
    said = fullbore("schedules").out
    assert "(P-1)/(vM+P-1)" in said
    assert "idle / total" in said
    for family in FAMILIES:
        assert f"{family.name}: {family.summary}" in said
