"""Bars on a grid of columns: single ones exact, narrow ones merged without losing any time."""

from __future__ import annotations

import numpy as np
import pytest

from fullbore.ir import Kind
from fullbore.timeline import Timeline
from fullbore.view.palette import rgb, shade
from fullbore.view.raster import rows


def test_wide_spans_keep_their_place(drawn):
    timeline = drawn((0, "0F0", 0.0, 1.0), (0, "2B0", 1.5, 4.0), (1, "1F0", 1.0, 2.0))
    laid = rows(timeline, columns=40, columns_per_s=10.0)
    assert laid.chunks == 2
    assert [(b.left, b.right, b.kind, b.chunk, b.span) for b in laid.bars[0]] == [
        (0.0, 10.0, Kind.F, 0, 0),
        (15.0, 40.0, Kind.B, 1, 1),
    ]
    assert [bar.span for bar in laid.bars[1]] == [2]
    assert laid.bars[0][1].color == shade(Kind.B, chunk=1, chunks=2)


def test_narrow_spans_become_their_mean_colour_as_faint_as_the_column_is_empty(drawn):
    half = [(0, f"0F{i}", i * 0.1, i * 0.1 + 0.05) for i in range(40)]
    (bars,) = rows(drawn(*half), columns=4, columns_per_s=1.0).bars
    assert [(bar.left, bar.right, bar.span, bar.strength) for bar in bars] == [(0, 4, -1, 0.5)]
    assert np.abs(np.subtract(rgb(bars[0].color), rgb(shade(Kind.F, chunk=0, chunks=1)))).max() <= 8


def test_a_mixed_column_lies_between_its_colours(drawn):
    mixed = [(0, f"0{'FB'[i % 2]}{i // 2}", i * 0.1, i * 0.1 + 0.1) for i in range(40)]
    (bars,) = rows(drawn(*mixed), columns=4, columns_per_s=1.0).bars
    mean = np.mean([rgb(shade(kind, chunk=0, chunks=1)) for kind in (Kind.F, Kind.B)], axis=0)
    assert all(np.abs(rgb(bar.color) - mean).max() <= 8 for bar in bars)
    assert sum(bar.right - bar.left for bar in bars) == 4


@pytest.mark.parametrize("seed", range(5))
def test_merging_keeps_how_busy_the_rank_is(seed):
    rng = np.random.default_rng(seed)
    edges = np.sort(rng.uniform(0, 100, 20_000))
    n = len(edges) // 2
    timeline = Timeline(
        source="measured",
        name="random",
        ranks=1,
        rank=np.zeros(n, dtype=np.int32),
        kind=rng.integers(0, 4, n).astype(np.int8),
        stage=np.zeros(n, dtype=np.int32),
        microbatch=np.arange(n, dtype=np.int32),
        start_s=edges[0::2],
        end_s=edges[1::2],
    )
    (bars,) = rows(timeline, columns=200, columns_per_s=2.0).bars
    drawn_s = sum((bar.right - bar.left) * bar.strength for bar in bars) / 2.0
    busy_s = float((timeline.end_s - timeline.start_s).sum())
    assert busy_s - 1e-9 <= drawn_s <= busy_s + 100 / 4
    assert len(bars) <= 200


def test_a_timeline_without_spans_has_empty_rows(drawn):
    silent = drawn((0, "0SEND_F0", 0.0, 1.0), ranks=3)
    assert rows(silent, columns=10, columns_per_s=1.0).bars == ((), (), ())
