"""Timelines to draw: small ones that can be checked by eye, and large ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.ir import Action
from fullbore.sim import simulate
from fullbore.timeline import Timeline, live_curves
from fullbore.view import Panel

MakePanel = Callable[..., Panel]
MakeTimeline = Callable[..., Timeline]


@pytest.fixture
def simulated() -> MakePanel:
    """Makes a panel of a family's schedule: F takes 1 s, B 2 s, divided among virtual stages."""

    def make(
        family: str = "1f1b",
        *,
        title: str = "predicted",
        ranks: int = 4,
        microbatches: int = 8,
        virtual_stages: int = 1,
        hop_s: float = 0.0,
        scale: float = 1.0,
    ) -> Panel:
        schedule = schedules.build(
            family,
            ranks=ranks,
            microbatches=microbatches,
            virtual_stages=virtual_stages if virtual_stages > 1 else None,
        )
        costs = Costs.uniform(
            stages=ranks * virtual_stages,
            forward_s=scale / virtual_stages,
            backward_s=2 * scale / virtual_stages,
            hop_s=hop_s,
        )
        timeline = simulate(schedule, costs)
        curves = live_curves(timeline, schedule)
        return Panel(title=title, timeline=timeline, curves=curves)

    return make


@pytest.fixture
def drawn() -> MakeTimeline:
    """Makes a timeline from (rank, action, start, end) written out by hand."""

    def make(*spans: tuple[int, str, float, float], ranks: int | None = None) -> Timeline:
        actions = [Action.parse(text) for _, text, _, _ in spans]
        rank = np.array([span[0] for span in spans], dtype=np.int32)
        return Timeline(
            source="measured",
            name="by hand",
            ranks=int(rank.max()) + 1 if ranks is None else ranks,
            rank=rank,
            kind=np.array([action.kind for action in actions], dtype=np.int8),
            stage=np.array([action.stage for action in actions], dtype=np.int32),
            microbatch=np.array([action.microbatch for action in actions], dtype=np.int32),
            start_s=np.array([span[2] for span in spans], dtype=np.float64),
            end_s=np.array([span[3] for span in spans], dtype=np.float64),
        )

    return make
