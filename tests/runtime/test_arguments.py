"""What a Pipeline refuses, on one process and on several, and how it says so."""

import argument_jobs as jobs
import pytest
import torch
from pipe_models import batch, block_stages, mse
from ranks import run_ranks
from torch import nn

from fullbore import schedules
from fullbore.errors import PipelineError, RankError, VerificationError
from fullbore.ir import from_text
from fullbore.runtime import Pipeline

ALONE = schedules.gpipe(ranks=1, microbatches=2)


def test_one_rank_needs_no_process_group() -> None:
    [stage] = block_stages(1)
    x, y = batch(4)
    with Pipeline({0: stage}, ALONE, mse) as pipe:
        result = pipe.step(x, y, return_outputs=True)
    assert result.outputs is not None and result.losses is not None
    assert torch.equal(torch.cat(result.outputs), torch.cat([stage(x[:2]), stage(x[2:])]))
    assert result.loss == pytest.approx(sum(float(loss) for loss in result.losses) / 2)


def test_reduction_sum_gives_the_plain_sum() -> None:
    [stage], [twin] = block_stages(1), block_stages(1)
    x, y = batch(4)
    result = Pipeline({0: stage}, ALONE, mse, reduction="sum").step(x, y)
    losses = [mse(twin(part), target) for part, target in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    assert result.loss == pytest.approx(sum(float(loss.detach()) for loss in losses))
    for p, q in zip(stage.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


@pytest.mark.parametrize(
    ("inputs", "targets", "says"),
    [
        (None, torch.zeros(2, 12), "inputs are missing"),
        (torch.zeros(2, 12), None, "targets are missing"),
        (torch.zeros(3, 12), torch.zeros(2, 12), "targets has 2 rows"),
        ([torch.zeros(2, 12)], torch.zeros(2, 12), "list of 1 entries"),
        (torch.zeros(1, 12), torch.zeros(1, 12), "too few for 2 microbatches"),
        (torch.tensor(1.0), torch.zeros(2, 12), "too few for 2 microbatches"),
    ],
)
def test_bad_batches(inputs: object, targets: object, says: str) -> None:
    [stage] = block_stages(1)
    with pytest.raises(RankError, match=says):
        Pipeline({0: stage}, ALONE, mse).step(inputs, targets)


def test_a_loss_that_is_no_number() -> None:
    [stage] = block_stages(1)
    pipe = Pipeline({0: stage}, ALONE, lambda output, target: output - target)
    with pytest.raises(RankError, match=r"rank 0 failed in 0F0 of step 1: .*one element"):
        pipe.step(*batch(4))


def test_bad_arguments_of_one_process() -> None:
    [stage] = block_stages(1)
    with pytest.raises(PipelineError, match="reduction"):
        Pipeline({0: stage}, ALONE, mse, reduction="average")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="modules were given for"):
        Pipeline({1: stage}, ALONE, mse)
    with pytest.raises(PipelineError, match="loss_fn is missing"):
        Pipeline({0: stage}, ALONE)
    with pytest.raises(PipelineError, match="no parameter 'nothing'"):
        Pipeline({0: stage}, ALONE, mse, tied=[{0: "nothing"}])
    with pytest.raises(PipelineError, match="torchrun"):
        Pipeline({0: stage}, schedules.gpipe(ranks=2, microbatches=2), mse)
    with pytest.raises(VerificationError, match="0B0"):
        Pipeline({0: stage}, from_text("0B0,0F0\n"), mse)


def test_a_closed_pipeline_says_so() -> None:
    [stage] = block_stages(1)
    with Pipeline({0: stage}, ALONE, mse) as pipe:
        pipe.step(*batch(4))
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(PipelineError, match="closed"):
            call(*batch(4))


def test_no_training_without_gradients() -> None:
    [stage] = block_stages(1)
    pipe = Pipeline({0: stage}, ALONE, mse)
    with torch.inference_mode():
        assert pipe.evaluate(*batch(4)).loss is not None
        with pytest.raises(RankError, match="inference_mode"):
            pipe.step(*batch(4))
    with torch.no_grad():
        pipe.step(*batch(4))
    assert all(p.grad is not None for p in stage.parameters())


def test_a_stage_without_parameters_runs() -> None:
    first, last = nn.Linear(12, 12), nn.Linear(12, 12)
    stages = {0: first, 1: nn.Tanh(), 2: last}
    schedule = schedules.interleaved(ranks=1, microbatches=2, virtual_stages=3)
    x, y = batch(4)
    Pipeline(stages, schedule, mse).step(x, y)
    twin = nn.Sequential(first, nn.Tanh(), last)
    grads = [p.grad.clone() for p in twin.parameters() if p.grad is not None]
    twin.zero_grad()
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (mse(twin(a), b) / 2).backward()
    assert len(grads) == 4
    for grad, p in zip(grads, twin.parameters(), strict=True):
        assert torch.equal(grad, p.grad)  # type: ignore[arg-type]


def test_what_one_rank_gets_wrong_every_rank_refuses() -> None:
    for wrong, says in (
        ("stages", "rank 1: the schedule places stages [1] here, but modules were given for [0]"),
        ("schedules", "different schedules"),
        ("size", "3 ranks, but the process group 2"),
        ("size of one", "rank 0: the schedule has 3 ranks, but the process group 2"),
        ("law", "rank 1: rank 1"),
        ("shapes", "static_shapes=False"),
        ("reduction", "different values of reduction"),
        ("record", "different values of record"),
        ("tied", "different tied weights"),
        ("sparse", "of step 2: PipelineError: a tensor of layout"),
        ("lambda", "of step 2: PipelineError: a stage's output holds what cannot be sent"),
        ("recompute", 'no stage has more than 3 blocks: the nearest legal values are 3 and "full"'),
        ("rows", "the inputs have 8 rows along dimension 0, the targets 2"),
    ):
        for error in run_ranks(jobs.refusal, 2, wrong):
            assert says in error, wrong


def test_what_is_no_such_thing_is_refused_by_every_rank_at_once() -> None:
    first, second = run_ranks(jobs.odd_kinds, 2)
    assert list(first) == list(jobs.ODD_KINDS)
    assert first == second
    for name, (kind, said) in first.items():
        assert kind == "PipelineError" and said.startswith(f"rank 1: {name} "), said


def test_copies_of_a_tied_weight_must_be_alike() -> None:
    for said in run_ranks(jobs.tied_oddly, 2):
        assert list(said) == list(jobs.TIED_ODDLY)
        for message in said.values():
            assert message == (
                "the ranks were given different shapes or dtypes of a tied weight, "
                "'w' of stage 0, 'w' of stage 1"
            )
    stages = {0: nn.Linear(4, 4), 1: nn.Linear(4, 2)}
    schedule = schedules.interleaved(ranks=1, microbatches=2, virtual_stages=2)
    with pytest.raises(PipelineError, match=r"'weight' of stage 1 are \[4, 4\].* and \[2, 4\]"):
        Pipeline(stages, schedule, mse, tied=[{0: "weight", 1: "weight"}])


def test_ranks_that_call_different_methods_are_told() -> None:
    for said in run_ranks(jobs.different_calls, 2):
        assert "clip_grad_norm, waiting for rank 1" in said, said
        assert "the step's actions, waiting for rank 0" in said


def test_what_changes_beside_the_inputs_is_learnt_again() -> None:
    for found in run_ranks(jobs.changing_circumstances, 2):
        assert found == []


def test_a_rank_beside_the_group_is_told() -> None:
    outside, inside = run_ranks(jobs.beside_the_group, 2)
    assert "not in the given group" in outside
    assert inside == "no error"
