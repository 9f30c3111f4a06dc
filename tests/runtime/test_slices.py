"""Sequences in slices: gradients of whole sequences, and no more in memory than is counted."""

from __future__ import annotations

from typing import Any

import pytest
import slice_jobs as jobs
import torch
from family_jobs import counted
from ranks import run_ranks
from slice_jobs import Case
from torch import nn

from fullbore import schedules
from fullbore.errors import PipelineError
from fullbore.passes import offload
from fullbore.runtime import Pipeline
from fullbore.verify import verify

CASES = [Case(m, k) for m in (1, 3, 4) for k in (2, 4)]
OPTIONS = [
    Case(3, 2, split=True),
    Case(3, 4, recompute="full"),
    Case(3, 2, recompute="placed", record=True),
    Case(2, 4, split=True, recompute="full", overlap=False),
    Case(2, 4, dtype=torch.float32),
]
ALONE = [Case(2, 3, stages=2), Case(1, 4, stages=3)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_equal_those_of_whole_sequences(ranks: int) -> None:
    cases = [*CASES, *{1: ALONE, 2: OPTIONS, 4: OPTIONS[:1]}[ranks]]
    for found in run_ranks(jobs.compare, ranks, ranks, cases):
        for case, (off, loss_off) in found.items():
            close = 1e-12 if case.dtype == torch.float64 else 5e-6
            assert off <= close, (case, off)
            assert loss_off <= close, (case, loss_off)


def test_replicas_have_the_gradients_of_the_whole_batch() -> None:
    assert max(run_ranks(jobs.compare_replicas, 2, Case(2, 4))) <= 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_held_is_what_the_verifier_counts(ranks: int) -> None:
    cases = [Case(3, 2), Case(2, 4)]
    measured = run_ranks(jobs.live, ranks, ranks, cases)
    for case in cases:
        schedule = case.schedule(ranks)
        most = [found[case] for found in measured]
        assert most == counted(schedule), case
        unit = schedule.activation_unit
        assert verify(schedule, peak_limit=[m * unit for m in most]) == []
        one_less = verify(schedule, peak_limit=[(m - 1) * unit for m in most])
        assert {violation.rank for violation in one_less} == set(range(ranks))


def alone(stage: nn.Module, microbatches: int, slices: int, **options: Any) -> Pipeline:
    schedule = schedules.seq1f1b(ranks=1, microbatches=microbatches, slices=slices)
    return Pipeline({0: stage}, schedule, nn.functional.mse_loss, **options)


def test_any_state_can_be_carried() -> None:
    torch.manual_seed(1)
    stage, x, y = jobs.Running().double(), *torch.randn(2, 4, 8, jobs.WIDTH).double()
    (((x + stage(x)) - y) ** 2).mean().backward()
    expected = {name: p.grad for name, p in stage.named_parameters()}
    stage.zero_grad()
    with alone(stage, 2, 4) as pipe:
        pipe.step(x, y)
    for name, weight in stage.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-12, atol=1e-15)


class Falling(jobs.Attending):
    """Raises in the forward that is told."""

    calls_left = 100

    def forward(self, x: torch.Tensor, carry: Any = None) -> Any:
        self.calls_left -= 1
        if not self.calls_left:
            raise RuntimeError("fell")
        return super().forward(x, carry)


def test_a_step_after_a_failed_one_carries_nothing_of_it() -> None:
    torch.manual_seed(1)
    stage, twin = Falling().double(), jobs.Attending().double()
    twin.load_state_dict(stage.state_dict())
    x, y = torch.randn(2, 2, 8, jobs.WIDTH).double()
    nn.functional.mse_loss(twin(x), y).backward()
    with alone(stage, 2, 4) as pipe:
        stage.calls_left = 7
        with pytest.raises(Exception, match="fell"):
            pipe.step(x, y)
        stage.calls_left = 100
        stage.zero_grad()
        pipe.step(x, y)
    for found, expected in zip(stage.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_what_does_not_go_with_slices_is_refused_before_anything_starts() -> None:
    with pytest.raises(PipelineError, match=r"stage 0 \(Linear\) does not take carry: let its for"):
        alone(nn.Linear(3, 3), 2, 2)
    with pytest.raises(PipelineError, match=r'recompute=1 .* give recompute="full"'):
        alone(jobs.Attending(), 2, 2, recompute=1)
    away = offload(schedules.seq1f1b(ranks=1, microbatches=2, slices=4))
    with pytest.raises(PipelineError, match=r"into 4 slices, and offloads .* use one of the"):
        Pipeline({0: jobs.Attending()}, away, nn.functional.mse_loss)


def test_batches_that_cannot_be_cut_are_refused() -> None:
    x = torch.randn(4, 10, jobs.WIDTH)
    with alone(jobs.Attending(), 2, 4) as pipe:
        for inputs, targets, told in (
            (x, x, "of 10 make no 4 slices of one length.* nearest legal lengths are 8 and 12"),
            (x[:, :3], x[:, :3], "legal lengths are 4;"),
            (x[:, :8], x[:, 0, 0], r"targets has 0 entries along dimension 1, not 8 as the batch"),
            (list(x.chunk(2)), x, "list of 2 entries, but the schedule has 2 microbatches × 4 sl"),
        ):
            with pytest.raises(PipelineError, match=told):
                pipe.step(inputs, targets)
        slices = [part[:, a : a + 2] for part in x[:, :8].chunk(2) for a in range(0, 8, 2)]
        whole = pipe.step(x[:, :8], x[:, :8], return_outputs=True)
        told = pipe.step(slices, slices, return_outputs=True)
        assert whole.outputs is not None and told.outputs is not None and whole.losses is not None
        assert len(whole.losses) == len(whole.outputs) == 8
        assert all(map(torch.equal, whole.outputs, told.outputs))


def test_bytes_of_a_microbatch_are_those_of_its_slices_together() -> None:
    x = torch.randn(2, 8, jobs.WIDTH)
    with alone(jobs.Attending(), 2, 4, record=True) as pipe:
        result = pipe.step(x, x)
    # alone a rank holds one microbatch at most; later slices keep the keys of more tokens
    assert result.stage_activation_bytes == result.peak_activation_bytes


class Forgetful(nn.Linear):
    def forward(self, x: torch.Tensor, carry: Any = None) -> Any:
        return super().forward(x)


def test_a_stage_that_returns_no_pair_is_told_so() -> None:
    with alone(Forgetful(3, 3), 1, 2) as pipe, pytest.raises(Exception, match=r"pair \(output, ca"):
        pipe.step(torch.randn(1, 2, 3), torch.randn(1, 2, 3))
