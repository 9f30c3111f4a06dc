"""Slices of a sequence: what a stage hands from each to the next, and the gradients that return.

A stage that can run a sequence slice by slice takes what it gave for the slice before, such as the
keys and values to attend to, and gives what the next one needs:

    output, carry = stage(value, carry=())       the first slice of a sequence
    output, carry = stage(value, carry=carry)    each later one

Between two slices the graph is cut, as it is between two stages: the later slice gets leaves. Its
backward, which comes first, leaves in them the gradients of what was handed on; that of the earlier
slice starts from those beside the gradient of its output. So gradients are those of whole
sequences, with additions in another order.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError

__all__ = ["CARRY", "Carry", "taken_apart", "takes_carry"]

CARRY = "carry"  # the argument by which a stage takes it


@dataclass(slots=True, kw_only=True)
class _Handed:
    """From one slice to the next.

    edges: of the tensors that want a gradient, in the graph of the slice that gave them. leaves:
    the same tensors, as the next slice gets them. given: all that it gets, until it has.
    """

    edges: list[GradientEdge]
    leaves: list[torch.Tensor]
    given: Any


class Carry:
    """What one stage carries from slice to slice. slices: k, of each sequence.

    Slices k*m to k*m + k-1 are a sequence, forwards in this order and backwards in reverse.
    """

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._handed: dict[int, _Handed] = {}  # by the slice that gave it

    def arrived(self, microbatch: int) -> Any:
        """What a slice gets from the one before; nothing, (), if it is a sequence's first."""
        if microbatch % self._slices == 0:
            return ()
        handed = self._handed[microbatch - 1]
        if not handed.leaves:  # no gradient will ask for it
            del self._handed[microbatch - 1]
        given, handed.given = handed.given, None
        return given

    def hand_on(self, microbatch: int, carry: Any) -> None:
        """Cut the graph between a slice, which gave this, and the next one."""
        if (microbatch + 1) % self._slices == 0:
            return
        edges: list[GradientEdge] = []
        leaves: list[torch.Tensor] = []

        def leaf_of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            leaf = value.detach()
            if value.requires_grad:
                edges.append(get_gradient_edge(value))
                leaves.append(leaf.requires_grad_())
            return leaf

        given = pytree.tree_map(leaf_of, carry)
        self._handed[microbatch] = _Handed(edges=edges, leaves=leaves, given=given)

    def edges(self, microbatch: int) -> list[GradientEdge]:
        """Of what a slice has handed on."""
        handed = self._handed.get(microbatch)
        return [] if handed is None else handed.edges

    def with_returned(
        self,
        microbatch: int,
        edges: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor | None],
    ) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
        """Where a slice's backward starts: at its output, and at what it handed on."""
        handed = self._handed.pop(microbatch, None)
        if handed is None:
            return list(edges), list(gradients)
        returned = [leaf.grad for leaf in handed.leaves]
        return [*edges, *handed.edges], [*gradients, *returned]

    def reset(self) -> None:
        """Forget everything: a failed step leaves nothing behind."""
        self._handed.clear()


def taken_apart(result: Any) -> tuple[Any, Any]:
    """Output and carry of a stage that carries; PipelineError for any other result."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise PipelineError(
            "with sequences in slices a stage returns the pair (output, carry), not "
            f"{type(result).__name__}: carry is whatever its next slice needs, () for nothing"
        )
    return result


def takes_carry(stage: nn.Module) -> bool:
    """Whether a stage's forward has an argument for what it carries."""
    parameters = inspect.signature(stage.forward).parameters.values()
    return any(p.name == CARRY or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
