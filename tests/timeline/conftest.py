"""Timelines drawn by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fullbore.ir import Action
from fullbore.timeline import Timeline

Row = list[tuple[str, float, float]]


@pytest.fixture
def draw() -> Callable[..., Timeline]:
    """Call with a row of (action, start, end) a rank for a measured timeline."""
    return _draw


def _draw(*rows: Row) -> Timeline:
    spans = [(rank, Action.parse(a), s, e) for rank, row in enumerate(rows) for a, s, e in row]
    return Timeline(
        source="measured",
        name="drawn",
        ranks=len(rows),
        rank=np.array([rank for rank, _, _, _ in spans], dtype=np.int32),
        kind=np.array([action.kind for _, action, _, _ in spans], dtype=np.int8),
        stage=np.array([action.stage for _, action, _, _ in spans], dtype=np.int32),
        microbatch=np.array([action.microbatch for _, action, _, _ in spans], dtype=np.int32),
        start_s=np.array([start for _, _, start, _ in spans]),
        end_s=np.array([end for _, _, _, end in spans]),
    )
