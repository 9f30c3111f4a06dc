"""The table of schedules, and what is refused with which nearest legal value."""

from __future__ import annotations

import pytest

from fullbore import schedules
from fullbore.errors import ScheduleError
from fullbore.schedules import FAMILIES, build, gpipe, interleaved, looped_bfs, one_f_one_b


def test_names_are_those_of_the_command_line_and_of_the_schedules() -> None:
    assert [family.name for family in FAMILIES] == [
        *("gpipe", "1f1b", "interleaved", "looped-bfs", "eager-1f1b", "zb-h1", "zb-h2", "zb-v"),
        *("v-half", "v-min", "gis", "gis-h", "hanayo", "dualpipe-v", "dualpipe", "seq1f1b"),
    ]
    for family in FAMILIES:
        assert build(family.name, ranks=2, microbatches=2).name == family.name


def test_every_family_is_described() -> None:
    for family in FAMILIES:
        for text in (
            family.summary,
            family.bubble,
            family.bubble_overhead,
            family.memory,
            family.holds,
        ):
            assert text
            assert "\n" not in text
        assert "P >= 1" in family.constraints or family.name == "dualpipe"


def test_build_is_the_generator() -> None:
    assert build("gpipe", ranks=3, microbatches=2) == gpipe(ranks=3, microbatches=2)
    assert build("1f1b", ranks=3, microbatches=2, virtual_stages=1) == one_f_one_b(
        ranks=3, microbatches=2
    )
    assert build("looped-bfs", ranks=2, microbatches=3, virtual_stages=3) == looped_bfs(
        ranks=2, microbatches=3, virtual_stages=3
    )
    assert build(
        "interleaved", ranks=2, microbatches=6, virtual_stages=3, microbatch_group_size=3
    ) == interleaved(ranks=2, microbatches=6, virtual_stages=3, microbatch_group_size=3)


def test_virtual_stages_are_two_where_nobody_says() -> None:
    for name in ("interleaved", "looped-bfs"):
        assert build(name, ranks=2, microbatches=2).virtual_stages == 2


def test_groups_are_as_large_as_the_pipeline_where_nobody_says() -> None:
    assert interleaved(ranks=4, microbatches=8, virtual_stages=2) == interleaved(
        ranks=4, microbatches=8, virtual_stages=2, microbatch_group_size=4
    )


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"name": "gpipe", "ranks": 0, "microbatches": 4}, "nearest legal value is 1"),
        ({"name": "1f1b", "ranks": 4, "microbatches": 0}, "nearest legal value is 1"),
        ({"name": "1f1b", "ranks": 4, "microbatches": -3}, "nearest legal value is 1"),
        (
            {"name": "interleaved", "ranks": 4, "microbatches": 4, "virtual_stages": 0},
            "nearest legal value is 1",
        ),
        (
            {"name": "interleaved", "ranks": 4, "microbatches": 4, "microbatch_group_size": 3},
            "nearest legal value is 4",
        ),
        (
            {"name": "gpipe", "ranks": 4, "microbatches": 4, "virtual_stages": 2},
            "interleaved or looped-bfs or gis or gis-h or hanayo$",
        ),
        (
            {"name": "zb-v", "ranks": 4, "microbatches": 4, "virtual_stages": 3},
            "2 stages a rank, so virtual_stages .v. = 3 is not legal: leave it at 2",
        ),
        (
            {"name": "hanayo", "ranks": 4, "microbatches": 4, "virtual_stages": 3},
            "nearest legal values are 2 and 4",
        ),
        ({"name": "dualpipe", "ranks": 5, "microbatches": 4}, "nearest legal values are 4 and 6"),
        (
            {"name": "gis", "ranks": 5, "microbatches": 4, "microbatch_group_size": 2},
            "nearest legal value is 3",
        ),
        ({"name": "seq1f1b", "ranks": 5, "microbatches": 4, "slices": 0}, "legal value is 1"),
        ({"name": "1f1b", "ranks": 5, "microbatches": 4, "slices": 2}, "or choose seq1f1b"),
        (
            {"name": "looped-bfs", "ranks": 4, "microbatches": 4, "microbatch_group_size": 4},
            "choose interleaved or gis$",
        ),
        ({"name": "zigzag", "ranks": 4, "microbatches": 4}, "gpipe or 1f1b or interleaved"),
        ({"name": "1f1b", "ranks": 10**6, "microbatches": 1}, "nearest legal value is 8192"),
        ({"name": "1f1b", "ranks": 64, "microbatches": 10**12}, "nearest legal M is 781250"),
        (
            {"name": "looped-bfs", "ranks": 64, "microbatches": 4, "virtual_stages": 10**9},
            "fewer virtual stages",
        ),
    ],
)
def test_illegal_numbers_are_refused_with_the_nearest_legal_ones(
    arguments: dict[str, int | str], advice: str
) -> None:
    with pytest.raises(ScheduleError, match=advice):
        build(**arguments)


def test_the_nearest_legal_values_are_legal() -> None:
    assert gpipe(ranks=1, microbatches=1).actions == 2
    assert interleaved(ranks=1, microbatches=1, virtual_stages=1).actions == 2
    assert one_f_one_b(ranks=8192, microbatches=1).ranks == 8192


def test_all_names_exist() -> None:
    for name in schedules.__all__:
        assert hasattr(schedules, name)
