"""What a step is given, made a batch of M microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fullbore.errors import PipelineError
from fullbore.runtime.batch import Batch
from fullbore.runtime.microbatch import Cut, split
from fullbore.runtime.setup import Setup
from fullbore.runtime.stage import CountFunction

__all__ = ["make_batch"]


def make_batch(
    setup: Setup, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None, *, train: bool
) -> Batch:
    """The batch of this rank, with what its stages need; PipelineError where something is missing
    or cannot be split.
    """
    schedule, first, last = setup.schedule, setup.holds(0), setup.holds(-1)
    if train and torch.is_inference_mode_enabled():
        raise PipelineError("there are no gradients in torch.inference_mode: step outside of it")
    if first and inputs is None:
        raise PipelineError("inputs are missing on the rank of the first stage")
    if last and targets is None and train:
        raise PipelineError("targets are missing on the rank of the last stage")
    cut = Cut.like(
        inputs if first else targets if last else None,
        microbatches=schedule.microbatches // schedule.slices,
        slices=schedule.slices,
    )
    _check_slices(setup, cut)
    m = cut.parts
    parts = split(inputs, cut, what="inputs") if first else [None] * m
    labels = split(targets, cut, what="targets") if last else [None] * m
    return Batch(
        inputs=parts,
        targets=labels,
        counts=_count(labels, setup.count_fn) if last and targets is not None else [],
        kwargs=split(dict(kwargs or {}), cut, what="kwargs"),
        signatures=[],
        train=train,
        return_outputs=False,
        rows=cut.rows,
    )


def _check_slices(setup: Setup, cut: Cut) -> None:
    """A mean over slices is that over sequences only if all are of one length."""
    if cut.length is None or not cut.length % cut.slices or setup.count_fn or not setup.mean:
        return
    below = cut.length // cut.slices * cut.slices
    legal = f"{below} and {below + cut.slices}" if below else f"{cut.slices}"
    raise PipelineError(
        f"sequences of {cut.length} make no {cut.slices} slices of one length, and the loss is a "
        f"mean over slices: the nearest legal lengths are {legal}; or give count_fn, and a loss_fn "
        "that returns a sum"
    )


def _count(labels: Sequence[Any], count_fn: CountFunction | None) -> list[float]:
    return [] if count_fn is None else [float(count_fn(target)) for target in labels]
