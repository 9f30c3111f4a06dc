"""Times and amounts as people read them."""

from __future__ import annotations

import pytest

from fullbore.view.units import amount, plain, ticks, time_unit


@pytest.mark.parametrize(
    ("extent_s", "symbol", "number"),
    [(33.0, "s", "33"), (0.25, "ms", "250"), (4e-5, "µs", "40"), (2e-9, "ns", "2")],
)
def test_a_picture_has_one_unit(extent_s, symbol, number):
    unit = time_unit(extent_s)
    assert unit.symbol == symbol
    assert unit.number(extent_s) == number


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.0, 4, "0"),
        (-0.0, 4, "0"),
        (1 / 3, 4, "0.3333"),
        (1234567.0, 3, "1234567"),
        (0.1 + 0.2, 9, "0.3"),
        (-2.50, 4, "-2.5"),
        (1e-7, 3, "0.0000001"),
    ],
)
def test_numbers_have_neither_exponents_nor_trailing_zeros(value, digits, text):
    assert plain(value, digits=digits) == text


@pytest.mark.parametrize("extent", [1e-9, 0.033, 1.0, 7.3, 33.0, 99.99, 1e6])
@pytest.mark.parametrize("at_most", [2, 5, 12])
def test_ticks_are_round_and_within(extent, at_most):
    found = ticks(extent, at_most=at_most)
    assert found[0] == 0.0
    assert found[-1] <= extent * 1.001
    assert 1 <= len(found) <= at_most
    if len(found) > 1:
        assert plain(found[1], digits=9).replace(".", "").strip("0") in {"1", "2", "5"}


def test_bytes_are_scaled_and_counts_are_not():
    assert amount(3 * 2**30, "bytes") == "3 GiB"
    assert amount(1.5 * 2**20, "bytes") == "1.5 MiB"
    assert amount(512.0, "bytes") == "512 B"
    assert amount(5.5, "microbatches") == "5.5"
