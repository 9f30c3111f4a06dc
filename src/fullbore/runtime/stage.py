"""One stage at work: forward and backward of one microbatch through a module, by autograd.

After a forward only the way back is kept: the gradient edges of the outputs and the leaves that
the inputs became. The output itself lives as long as its message, or as autograd needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fullbore.errors import PipelineError
from fullbore.runtime.layout import Layout, flatten
from fullbore.runtime.recompute import Recomputation, Restored
from fullbore.runtime.split import SplitBackward

__all__ = ["Gradients", "LossFunction", "StageRunner", "as_leaves", "enter"]

LossFunction = Callable[[Any, Any], torch.Tensor]
Gradients = list[torch.Tensor | None]


@dataclass(slots=True, kw_only=True)
class _WayBack:
    """What the backward of one microbatch needs: nothing else of the forward is kept."""

    edges: list[GradientEdge]  # of the outputs that want a gradient, or of the loss
    shapes: list[tuple[torch.Size, torch.dtype, torch.device]]  # of what the edges lead to
    leaves: list[torch.Tensor]  # the inputs that want a gradient


class _Enter(torch.autograd.Function):
    """Turns a received leaf into a tensor that the stage may change in place, without a copy."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def enter(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a stage is given for its leaves: tensors that may be changed in place."""
    return [_Enter.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]  # type: ignore[no-untyped-call]


def as_leaves(layout: Layout, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """A message's tensors as leaves of a new graph, wanting gradients where the sender's do."""
    leaves: list[torch.Tensor] = []
    for described, tensor in zip(layout.tensors, tensors, strict=True):
        assert described is not None and tensor is not None
        leaves.append(tensor.requires_grad_(described.requires_grad))
    return leaves


class StageRunner:
    """Runs one stage's module and holds what its live microbatches need for their backward.

    Not thread-safe; one microbatch at a time. `loss_fn` belongs to the last stage.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        loss_fn: LossFunction | None,
        loss_weight: float,
        split: SplitBackward | None = None,
        recomputation: Recomputation | None = None,
    ) -> None:
        """split: the queues of a stage of which any backward is split. recomputation: what of it
        is dropped after a forward and made again.
        """
        self.module = module
        self.split, self.recomputation = split, recomputation
        self._loss_fn, self._loss_weight = loss_fn, loss_weight
        self._ways_back: dict[int, _WayBack] = {}

    def forward(
        self,
        microbatch: int,
        value: Any,
        leaves: Sequence[torch.Tensor],
        *,
        kwargs: dict[str, Any],
        target: Any,
        train: bool,
    ) -> Any:
        """Run the module; returns its output (on the last stage the pair of output and loss, the
        loss None where there is no target to an evaluation).

        value: the stage's input; a tuple is given as several arguments. leaves: its tensors, as
        they arrived; those that want a gradient get it in `backward`.
        """
        given = (value, kwargs, target)
        if not train:
            return self._call(given)
        split = self._split_of(microbatch)
        with nullcontext() if split is None else split.forward(microbatch):
            if self.recomputation is None:
                result = self._call(given)
            else:
                result = self.recomputation.run(microbatch, self._call, given)
        results = flatten(result)[1] if self._loss_fn is None else [result[1]]
        roots = [tensor for tensor in results if tensor.requires_grad]
        way_back = self._ways_back[microbatch] = _WayBack(
            edges=[get_gradient_edge(root) for root in roots],
            shapes=[(root.shape, root.dtype, root.device) for root in roots],
            leaves=[leaf for leaf in leaves if leaf.requires_grad],
        )
        if split is not None:
            split.search(microbatch, way_back.edges)
        return result

    def _split_of(self, microbatch: int) -> SplitBackward | None:
        split = self.split
        return split if split is not None and microbatch in split.microbatches else None

    def _call(self, given: Any) -> Any:
        """The module, and the loss behind it where there is one and it can be had."""
        value, kwargs, target = given
        arguments = value if isinstance(value, tuple) else (value,)
        output = self.module(*arguments, **kwargs)
        if self._loss_fn is None:
            return output
        can_have_loss = target is not None or torch.is_grad_enabled()
        return output, self._loss(output, target) if can_have_loss else None

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        assert self._loss_fn is not None
        loss = self._loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
            raise PipelineError(f"loss_fn must return a tensor with one element, not {got}")
        return loss

    def backward(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """Full backward: adds to the parameters' .grad; returns the inputs' gradients.

        gradients: one for each output that wanted one (None: unused downstream); None on the
        last stage. Everything held for the microbatch is freed.
        """
        way_back = self._ways_back.pop(microbatch)
        self._run_back(way_back, gradients)
        if self.recomputation is not None:
            self.recomputation.forget(microbatch)
        return _take_gradients(way_back.leaves)

    def backward_input(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """Input-gradient half (I): as `backward`, but the weights of products wait for W."""
        assert self.split is not None
        with self.split.input_half(microbatch):
            return self.backward(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        """Weight-gradient half (W): adds what waited to the parameters' .grad, and frees it."""
        assert self.split is not None
        self.split.weight_half(microbatch)

    def recompute(self, microbatch: int) -> None:
        """R: what its forward did not keep is made again now, ahead of its backward."""
        split = self._split_of(microbatch)
        assert self.recomputation is not None
        with nullcontext() if split is None else split.again(microbatch):
            self.recomputation.ahead(microbatch)

    def tell_restored(self, told: Restored | None) -> None:
        """Who is told what recomputations bring back."""
        if self.recomputation is not None:
            self.recomputation.restored = told

    def kept(self, microbatch: int) -> Iterable[torch.Tensor]:
        """What a forward keeps to be recomputed from."""
        return () if self.recomputation is None else self.recomputation.kept(microbatch)

    def waiting(self, microbatch: int) -> Iterator[torch.Tensor]:
        """The tensors that wait between I and W."""
        assert self.split is not None
        return self.split.held(microbatch)

    def reset(self) -> None:
        """Forget every live microbatch: a failed step leaves nothing behind."""
        self._ways_back.clear()
        if self.split is not None:
            self.split.reset()
        if self.recomputation is not None:
            self.recomputation.reset()

    def _run_back(self, way_back: _WayBack, gradients: Gradients | None) -> None:
        if gradients is None:  # the last stage: d(step's loss) / d(this microbatch's loss)
            gradients = [
                torch.full(shape, self._loss_weight, dtype=dtype, device=device)
                for shape, dtype, device in way_back.shapes
            ]
        used = [(e, g) for e, g in zip(way_back.edges, gradients, strict=True) if g is not None]
        if used:
            torch.autograd.backward(
                [edge for edge, _ in used],
                [gradient for _, gradient in used],
            )


def _take_gradients(leaves: Sequence[torch.Tensor]) -> Gradients:
    gradients: Gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients
