"""Splitting a step's inputs, targets and keyword arguments into M microbatches, never by guess.

A tensor is split along dimension 0; a list has one entry a microbatch; a tuple or a dict is split
member by member; anything else (None, a number, a string) goes to every microbatch as it is. Where
sequences are cut into slices a tensor is cut along dimension 1 as well, and a list has one entry a
slice.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError

__all__ = ["Cut", "signature", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a step's values are split. microbatches: M. slices: k, of each of their sequences.

    rows, length: what every tensor must have along dimension 0, and along dimension 1 where there
    are slices; None where that is not known.
    """

    microbatches: int
    slices: int = 1
    rows: int | None = None
    length: int | None = None

    @staticmethod
    def like(value: Any, *, microbatches: int, slices: int) -> Cut:
        """For values that have the sizes of the first tensor in this one that will be split."""
        shape = _first_shape(value)
        return Cut(
            microbatches=microbatches,
            slices=slices,
            rows=None if shape is None else shape[0] if shape else 0,
            length=shape[1] if shape is not None and len(shape) > 1 else None,
        )

    @property
    def parts(self) -> int:
        """How many entries a value is split into: what the schedule calls microbatches."""
        return self.microbatches * self.slices


def split(value: Any, cut: Cut, *, what: str) -> list[Any]:
    """One entry a microbatch, or a slice.

    A tensor of n rows gives microbatches of n // M or n // M + 1 rows, the longer ones first, and
    slices of a sequence likewise. what: how messages name the value. Raises PipelineError if a
    tensor cannot be cut so or has not the cut's sizes, or if a list has another number of entries.
    """
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, cut, what)
    if isinstance(value, list):
        if len(value) != cut.parts:
            slices = f" × {cut.slices} slices" if cut.slices > 1 else ""
            raise PipelineError(
                f"{what} is a list of {len(value)} entries, but the schedule has "
                f"{cut.microbatches} microbatches{slices}: give one entry a "
                f"{'slice' if slices else 'microbatch'}"
            )
        return value
    if isinstance(value, tuple):
        parts = [split(v, cut, what=f"{what}[{i}]") for i, v in enumerate(value)]
        return [tuple(members) for members in zip(*parts, strict=True)] or [()] * cut.parts
    if isinstance(value, dict):
        split_up = {key: split(v, cut, what=f"{what}[{key!r}]") for key, v in value.items()}
        return [{key: v[m] for key, v in split_up.items()} for m in range(cut.parts)]
    return [value] * cut.parts


def _split_tensor(tensor: torch.Tensor, cut: Cut, what: str) -> list[torch.Tensor]:
    rows = tensor.shape[0] if tensor.ndim else 0
    if cut.rows is not None and rows != cut.rows:
        raise PipelineError(
            f"{what} has {rows} rows along dimension 0, but the batch has {cut.rows}: a tensor is "
            "split along dimension 0; if that is not meant, give a list with one entry a microbatch"
        )
    if rows < cut.microbatches:
        raise PipelineError(
            f"{what} has {rows} rows along dimension 0, too few for {cut.microbatches} "
            f"microbatches: give at least {cut.microbatches} rows, or a list with one entry a "
            "microbatch"
        )
    parts = list(torch.tensor_split(tensor, cut.microbatches))
    return parts if cut.slices == 1 else _slice(parts, cut, what)


def _slice(parts: list[torch.Tensor], cut: Cut, what: str) -> list[torch.Tensor]:
    """The slices of some microbatches, one after the other."""
    shape = parts[0].shape
    length = shape[1] if len(shape) > 1 else 0
    if length < cut.slices or (cut.length is not None and length != cut.length):
        wanted = f"{cut.slices} or more" if cut.length is None else f"{cut.length} as the batch"
        raise PipelineError(
            f"{what} has {length} entries along dimension 1, not {wanted}: with sequences in "
            "slices a tensor is cut along dimension 1; if that is not meant, give a list with one "
            "entry a slice"
        )
    return [
        piece.contiguous()
        for part in parts
        for piece in torch.tensor_split(part, cut.slices, dim=1)
    ]


def _first_shape(value: Any) -> torch.Size | None:
    """The shape of the first tensor in a value that will be split, or None if there is none."""
    if isinstance(value, torch.Tensor):
        return value.shape
    members = value.values() if isinstance(value, dict) else value
    if isinstance(value, tuple | dict):
        return next((n for n in map(_first_shape, members) if n is not None), None)
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
