"""Splitting a step's inputs, targets and keyword arguments into M microbatches, never by guess.

A tensor is split along dimension 0; a list has one entry a microbatch; a tuple or a dict is split
member by member; anything else (None, a number, a string) goes to every microbatch as it is.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError

__all__ = ["batch_size", "signature", "split"]


def split(value: Any, microbatches: int, *, what: str, size: int | None = None) -> list[Any]:
    """One entry a microbatch.

    A tensor of n rows gives microbatches of n // M or n // M + 1 rows, the longer ones first.
    what: how messages name the value. size: rows that every tensor must have, if known.
    Raises PipelineError if a tensor has fewer than M rows or not `size`, or a list not M entries.
    """
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, microbatches, what, size)
    if isinstance(value, list):
        if len(value) != microbatches:
            raise PipelineError(
                f"{what} is a list of {len(value)} entries, but the schedule has "
                f"{microbatches} microbatches: give one entry a microbatch"
            )
        return value
    if isinstance(value, tuple):
        parts = [split(v, microbatches, what=f"{what}[{i}]", size=size) for i, v in _items(value)]
        return [tuple(members) for members in zip(*parts, strict=True)] or [()] * microbatches
    if isinstance(value, dict):
        split_up = {
            key: split(v, microbatches, what=f"{what}[{key!r}]", size=size)
            for key, v in value.items()
        }
        return [{key: v[m] for key, v in split_up.items()} for m in range(microbatches)]
    return [value] * microbatches


def _items(value: tuple[Any, ...]) -> list[tuple[int, Any]]:
    return list(enumerate(value))


def _split_tensor(
    tensor: torch.Tensor, microbatches: int, what: str, size: int | None
) -> list[torch.Tensor]:
    rows = tensor.shape[0] if tensor.ndim else 0
    if size is not None and rows != size:
        raise PipelineError(
            f"{what} has {rows} rows along dimension 0, but the batch has {size}: a tensor is "
            "split along dimension 0; if that is not meant, give a list with one entry a microbatch"
        )
    if rows < microbatches:
        raise PipelineError(
            f"{what} has {rows} rows along dimension 0, too few for {microbatches} microbatches: "
            f"give at least {microbatches} rows, or a list with one entry a microbatch"
        )
    return list(torch.tensor_split(tensor, microbatches))


def batch_size(value: Any) -> int | None:
    """Rows of the first tensor in a value that will be split, or None if there is none."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else 0
    members = value.values() if isinstance(value, dict) else value
    if isinstance(value, tuple | dict):
        return next((n for n in map(batch_size, members) if n is not None), None)
    return None


def signature(value: Any) -> Hashable:
    """What decides the layout of what a stage makes of a value: its nest, and of each tensor the
    shape, the dtype, and whether it wants a gradient.
    """
    if isinstance(value, torch.Tensor):  # the common case, without the walk
        return _of_tensor(value)
    leaves, nest = pytree.tree_flatten(value)
    return (
        str(nest),
        tuple(
            _of_tensor(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
        ),
    )


def _of_tensor(tensor: torch.Tensor) -> Hashable:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad
