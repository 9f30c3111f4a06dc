"""What a step is given, made a batch of M microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fullbore.errors import PipelineError
from fullbore.runtime.batch import Batch
from fullbore.runtime.microbatch import batch_size, split
from fullbore.runtime.setup import Setup
from fullbore.runtime.stage import CountFunction

__all__ = ["make_batch"]


def make_batch(
    setup: Setup, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None, *, train: bool
) -> Batch:
    """The batch of this rank, with what its stages need; PipelineError where something is missing
    or cannot be split.
    """
    m = setup.schedule.microbatches
    if train and torch.is_inference_mode_enabled():
        raise PipelineError("there are no gradients in torch.inference_mode: step outside of it")
    first, last = setup.holds(0), setup.holds(-1)
    if first and inputs is None:
        raise PipelineError("inputs are missing on the rank of the first stage")
    if last and targets is None and train:
        raise PipelineError("targets are missing on the rank of the last stage")
    size = batch_size(inputs) if first else batch_size(targets) if last else None
    parts = split(inputs, m, what="inputs", size=size) if first else [None] * m
    labels = split(targets, m, what="targets", size=size) if last else [None] * m
    return Batch(
        inputs=parts,
        targets=labels,
        counts=_count(labels, setup.count_fn) if last and targets is not None else [],
        kwargs=split(dict(kwargs or {}), m, what="kwargs", size=size),
        signatures=[],
        train=train,
        return_outputs=False,
        rows=size,
    )


def _count(labels: Sequence[Any], count_fn: CountFunction | None) -> list[float]:
    return [] if count_fn is None else [float(count_fn(target)) for target in labels]
