"""Colours that can be read, and told apart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fullbore.ir import COMPUTE_KINDS, COPY_KINDS, Kind
from fullbore.view.palette import IDLE_DARK, IDLE_LIGHT, LABELS, ink, rgb, shade


def luminance(color: str) -> float:
    """Relative luminance, as WCAG 2.2 defines it."""
    part = np.array(rgb(color)) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("chunks", [1, 2, 4, 32])
@pytest.mark.parametrize("kind", COMPUTE_KINDS)
def test_numbers_can_be_read_on_every_shade(kind, chunks):
    for chunk in range(chunks):
        ground = shade(kind, chunk=chunk, chunks=chunks)
        assert contrast(ink(ground), ground) >= 4.2


@pytest.mark.parametrize("kind", [*COMPUTE_KINDS, *COPY_KINDS])
def test_bars_stand_out_from_idle_in_both_schemes(kind):
    assert contrast(shade(kind, chunk=0, chunks=1), IDLE_LIGHT) >= 2
    assert contrast(shade(kind, chunk=0, chunks=1), IDLE_DARK) >= 2


def test_kinds_and_chunks_differ():
    for one, other in itertools.combinations(COMPUTE_KINDS, 2):
        apart = np.subtract(
            rgb(shade(one, chunk=0, chunks=1)), rgb(shade(other, chunk=0, chunks=1))
        )
        assert np.linalg.norm(apart) > 100
    shades = [shade(Kind.F, chunk=chunk, chunks=8) for chunk in range(8)]
    assert len(set(shades)) == 8
    assert shades == sorted(shades, key=luminance)


def test_every_kind_has_a_label():
    assert set(LABELS) == set(Kind)
