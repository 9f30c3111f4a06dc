"""A split backward gives the gradients of a whole one, bit for bit, whatever a stage is made of."""

import pytest
import torch
from pipe_models import batch, differences, gradients, mse, reference
from split_models import MODELS, stages_of
from torch import nn

from fullbore.passes import recompute_ahead, split_backward
from fullbore.runtime import Pipeline
from fullbore.schedules import gpipe


@pytest.fixture(autouse=True)
def one_thread():
    """Small products on several threads wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("loss", [mse, lambda output, target: output.sum()], ids=["mse", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_every_kind_of_stage(name, loss) -> None:
    stages, twins = stages_of(name, 2), stages_of(name, 2)
    schedule = split_backward(gpipe(ranks=1, microbatches=3), delay=1)
    with Pipeline({0: nn.Sequential(*stages)}, schedule, loss) as pipe:
        for step in range(3):
            x, y = batch(9, seed=step)
            torch.manual_seed(step)
            losses, expected = reference(twins, x.chunk(3), y.chunk(3), loss)
            torch.manual_seed(step)
            result = pipe.step(x, y)
            assert [float(one) for one in result.losses] == losses
            assert differences(gradients(dict(enumerate(stages))), expected) == []


RECOMPUTED = ["block", "gpt", "tied", "in-half", "checkpoint", "reentrant", "own-function"]


@pytest.mark.parametrize("ahead", [None, 0, 2], ids=["inside", "ahead-0", "ahead-2"])
@pytest.mark.parametrize("recompute", ["full", 1])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_gradients_of_recomputed_stages(name, recompute, ahead) -> None:
    stages, twins = stages_of(name, 2), stages_of(name, 2)
    schedule = split_backward(gpipe(ranks=1, microbatches=3), delay=1)
    if ahead is not None:
        schedule = recompute_ahead(schedule, ahead=ahead)
    with Pipeline({0: nn.Sequential(*stages)}, schedule, mse, recompute=recompute) as pipe:
        for step in range(2):
            x, y = batch(9, seed=step)
            torch.manual_seed(step)
            _, expected = reference(twins, x.chunk(3), y.chunk(3))
            torch.manual_seed(step)
            pipe.step(x, y)
            assert differences(gradients(dict(enumerate(stages))), expected) == []
