"""What crosses a stage boundary: any nest of tensors, flattened to a list and put together again.

A `Layout` says everything that the bytes do not: the nest's shape, each tensor's shape and dtype,
and which of them want a gradient. It is learnt from the first message of its kind and kept, so
that later messages are bare tensors.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError

__all__ = ["Layout", "TensorLayout", "flatten", "gradient_layout", "unflatten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        gradient = " with gradient" if self.requires_grad else ""
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{gradient}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One message: tensors in order (None: absent), and the nest that they are leaves of.

    structure: the pickled nest, its non-tensor leaves included; empty for gradients, which are a
    plain list. fixed: whether later messages of the same kind may be taken to look the same;
    not so where Python numbers travel along, or where a gradient was absent.
    """

    tensors: tuple[TensorLayout | None, ...]
    structure: bytes
    fixed: bool

    def __str__(self) -> str:
        return ", ".join("none" if t is None else str(t) for t in self.tensors)

    def is_just(self, value: Any) -> bool:
        """Whether this is the layout of `value`, a bare tensor: the common case, judged quickly."""
        if self.structure or type(value) is not torch.Tensor:
            return False
        tensor = self.tensors[0]
        return (
            tensor is not None
            and value.shape == tensor.shape
            and value.dtype is tensor.dtype
            and value.requires_grad is tensor.requires_grad
        )

    def as_leaves(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors as leaves of a new graph, wanting gradients where this layout says so."""
        return [
            tensor.requires_grad_(described is not None and described.requires_grad)
            for described, tensor in zip(self.tensors, tensors, strict=True)
        ]


class _TensorHere:
    """Stands in the pickled nest where a tensor was."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_TensorHere, ())


def _describe(tensor: torch.Tensor) -> TensorLayout:
    if tensor.layout is not torch.strided:
        raise PipelineError(
            f"a tensor of layout {tensor.layout} cannot go from stage to stage: make it dense, by "
            "to_dense()"
        )
    return TensorLayout(
        shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad
    )


def flatten(value: Any) -> tuple[Layout, list[torch.Tensor]]:
    """Take a stage's output apart: its layout and its tensors, in order.

    value: a tensor, or tuples, lists and dicts of tensors, None and picklable Python values; else
    PipelineError.
    """
    if isinstance(value, torch.Tensor):  # the common case, without the walk
        return Layout(tensors=(_describe(value),), structure=b"", fixed=True), [value]
    leaves, nest = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    fixed = all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)
    marked = [_TensorHere() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return (
        Layout(
            tensors=tuple(map(_describe, tensors)),
            structure=_pickled(pytree.tree_unflatten(marked, nest)),
            fixed=fixed,
        ),
        tensors,
    )


def _pickled(nest: Any) -> bytes:
    try:
        return pickle.dumps(nest)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PipelineError(
            "a stage's output holds what cannot be sent to the next one; give tensors, and Python "
            f"values that can be pickled: {error}"
        ) from error


def unflatten(layout: Layout, tensors: Sequence[torch.Tensor]) -> Any:
    """Put a stage's output together again: the reverse of `flatten`."""
    if not layout.structure:
        return tensors[0]
    remaining = iter(tensors)
    return pytree.tree_map(
        lambda leaf: next(remaining) if isinstance(leaf, _TensorHere) else leaf,
        pickle.loads(layout.structure),
    )


def gradient_layout(gradients: Sequence[torch.Tensor | None]) -> Layout:
    """The layout of a list of gradients, one for each output that wants one (None: unused)."""
    tensors = tuple(None if g is None else _describe(g) for g in gradients)
    return Layout(tensors=tensors, structure=b"", fixed=all(t is not None for t in tensors))
