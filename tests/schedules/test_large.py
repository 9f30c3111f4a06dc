"""The sizes that must work: a thousand ranks, thirty-two virtual stages, half a million actions."""

from __future__ import annotations

import numpy as np
import pytest

from fullbore.ir import Kind
from fullbore.passes import insert_communication, strip_communication
from fullbore.schedules import FAMILIES, build
from fullbore.verify import verify


def test_a_thousand_ranks() -> None:
    schedule = build("1f1b", ranks=1024, microbatches=2048)
    assert schedule.actions == 2 * 1024 * 2048
    assert (schedule.programs[0].kind[:1024] == Kind.F).all()
    assert schedule.programs[0].kind[1024] == Kind.B
    assert str(schedule.programs[1023][3]) == "1023B1"


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
def test_a_thousand_ranks_with_thirty_two_virtual_stages(name: str) -> None:
    schedule = build(name, ranks=1024, microbatches=8, virtual_stages=32)
    assert schedule.stages == 32768
    assert verify(schedule) == []


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
def test_half_a_million_actions_are_lawful_with_and_without_communication(name: str) -> None:
    schedule = build(name, ranks=64, microbatches=1024, virtual_stages=4)
    assert schedule.actions == 524_288
    assert verify(schedule) == []
    channelled = insert_communication(schedule)
    assert channelled.actions == 524_288 + 4 * 255 * 1024
    assert verify(channelled) == []
    assert strip_communication(channelled) == schedule


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_arrays_stay_narrow(name: str) -> None:
    for schedule in (made := build(name, ranks=4, microbatches=7), insert_communication(made)):
        for program in schedule.programs:
            assert program.kind.dtype == np.int8
            assert program.stage.dtype == np.int32
            assert program.microbatch.dtype == np.int32


@pytest.mark.parametrize("name", ["eager-1f1b", "zb-h2", "zb-v", "dualpipe-v", "dualpipe"])
def test_a_thousand_ranks_of_what_is_made_from_counts_and_phases(name: str) -> None:
    assert verify(build(name, ranks=1024, microbatches=8)) == []


@pytest.mark.parametrize("name", ["v-half", "v-min"])
def test_a_hundred_ranks_of_what_is_made_from_a_pattern(name: str) -> None:
    assert verify(build(name, ranks=100, microbatches=300)) == []


@pytest.mark.parametrize("name", ["gis", "gis-h"])
def test_half_a_million_actions_in_groups(name: str) -> None:
    assert verify(build(name, ranks=64, microbatches=1024, virtual_stages=4)) == []
