"""DeepSpeed's pipeline as one more engine, where it is installed: 1F1B with one stage a rank.

`DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed` installs it beside a CPU build of torch;
it compiles a small part of itself at its first start. Its step ends with an optimizer's, here of
one number a rank, and with the loss sent to every rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullbore.runtime import PacedStage, paced_loss

SCHEDULES = ("1f1b",)


def is_installed() -> bool:
    """Whether it can be imported."""
    return importlib.util.find_spec("deepspeed") is not None


class _Layer(nn.Module):
    """A paced stage, and a weight so that there is something to optimize."""

    def __init__(self, stage: PacedStage) -> None:
        super().__init__()
        self.stage, self.weight = stage, nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.stage(x)
        return output


def deepspeed_step(stage: PacedStage, ranks: int, inputs: torch.Tensor) -> Callable[[], Any]:
    """A step of its pipeline engine in the process group that is there.

    stage: each rank's. inputs: [M, width].
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    from deepspeed.pipe import PipelineModule

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = {
        "train_batch_size": len(inputs),
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "steps_per_print": 10**9,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        layers = [_Layer(stage) for _ in range(ranks)]
        model = PipelineModule(
            layers=layers, num_stages=ranks, loss_fn=paced_loss, partition_method="uniform"
        )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
    pairs = itertools.cycle([(inputs[:1], inputs[:1])])
    return lambda: engine.train_batch(data_iter=pairs)
