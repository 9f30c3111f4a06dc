"""The recorder: every action once, on one clock, in an order that could have happened."""

import numpy as np
import pytest
import recorder_jobs as jobs
import torch
from gradient_jobs import make
from pipe_models import WIDTH
from ranks import run_ranks
from torch import nn

from fullbore.ir import Kind, dependencies
from fullbore.passes import insert_communication
from fullbore.runtime import Pipeline
from fullbore.schedules import gpipe


@pytest.mark.parametrize("case", [("1f1b", 4, None), ("interleaved", 4, 2)], ids=str)
def test_the_timeline_holds_every_action_after_what_it_waits_for(case: jobs.Case) -> None:
    found = run_ranks(jobs.recorded, 2, 2, case)
    schedule = insert_communication(make(case, 2))
    flat, needs = schedule.flat(), dependencies(schedule)
    for timeline, _, _ in found:
        assert timeline.source == "measured" and timeline.ranks == 2
        for name in ("kind", "stage", "microbatch", "rank"):
            assert np.array_equal(getattr(timeline, name), getattr(flat, name))
        assert (timeline.end_s >= timeline.start_s).all()
        assert timeline.start_s[timeline.is_compute].min() == 0
        for before in (needs.value, needs.stored):
            has = before >= 0
            receives = np.isin(timeline.kind, (Kind.RECV_F, Kind.RECV_B)) & has
            # a receive may begin to wait before its send; it ends after the send began
            assert (timeline.end_s[receives] >= timeline.start_s[before[receives]]).all()
            others = has & ~receives
            assert (timeline.start_s[others] >= timeline.end_s[before[others]]).all()


def test_activation_bytes_are_those_that_autograd_saves() -> None:
    for case, live in ((("1f1b", 4, None), (2, 1)), (("gpipe", 4, None), (4, 4))):
        (_, peaks, saved_0), (_, _, saved_1) = run_ranks(jobs.recorded, 2, 2, case)
        assert peaks[0] == live[0] * saved_0
        output_bytes = 2 * WIDTH * 4  # which the loss saves besides
        assert peaks[1] == live[1] * (saved_1 + output_bytes)


def test_clocks_that_differ_are_set_to_rank_0() -> None:
    offsets = run_ranks(jobs.skewed_offset, 3, 3)
    assert offsets[0] == 0
    for rank in (1, 2):
        assert offsets[rank] == pytest.approx(-jobs.MINUTE_S * rank, abs=1.0)


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert run_ranks(jobs.unrecorded, 2, 2, ("1f1b", 2, None)) == [(None, None, None)] * 2


class _Growing(nn.Module):
    """Saves its input as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.copies = nn.Parameter(torch.ones(WIDTH)), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((x.clone() * self.weight).sum() for _ in range(self.copies))  # type: ignore


def test_a_stage_that_begins_to_save_more_is_seen_within_m_steps() -> None:
    stage, m = _Growing(), 3
    x = torch.ones(m, WIDTH)
    one = WIDTH * 4
    with Pipeline({0: stage}, gpipe(ranks=1, microbatches=m), _as_it_is, record=True) as pipe:
        assert pipe.step(x, x).peak_activation_bytes == (m * one,)
        stage.copies = 2
        seen = [pipe.step(x, x).peak_activation_bytes for _ in range(m)]
        assert seen == [(4 * one,), (5 * one,), (6 * one,)]
        longer = torch.ones(m, 2, WIDTH)
        assert pipe.step(longer, longer).peak_activation_bytes == (m * 2 * 2 * one,)


def _as_it_is(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output
