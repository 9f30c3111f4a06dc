"""One stage at work: forward and backward of one microbatch through a module, by autograd.

After a forward only the way back is kept: the gradient edges of the outputs and the leaves that
the inputs became. The output itself lives as long as its message, or as autograd needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fullbore.errors import PipelineError
from fullbore.runtime.layout import Layout, flatten

__all__ = ["CountFunction", "Gradients", "LossFunction", "StageRunner", "as_leaves", "enter"]

LossFunction = Callable[[Any, Any], torch.Tensor]
CountFunction = Callable[[Any], float | torch.Tensor]
Gradients = list[torch.Tensor | None]


@dataclass(slots=True, kw_only=True)
class _WayBack:
    """What the backward of one microbatch needs: nothing else of the forward is kept."""

    edges: list[GradientEdge]  # of the outputs that want a gradient, or of the loss
    shapes: list[tuple[torch.Size, torch.dtype, torch.device]]  # of what the edges lead to
    leaves: list[torch.Tensor]  # the inputs that want a gradient
    gradients: Gradients | None = None  # kept from I to W


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

    Not thread-safe; one microbatch at a time. `loss_fn` belongs to the last stage, and so does
    `loss_weight`, the step's loss derived by that of one microbatch; it may change between steps.
    """

    def __init__(
        self, *, module: nn.Module, loss_fn: LossFunction | None, loss_weight: float
    ) -> None:
        self.module = module
        self._loss_fn, self.loss_weight = loss_fn, loss_weight
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
        arguments = value if isinstance(value, tuple) else (value,)
        output = self.module(*arguments, **kwargs)
        if self._loss_fn is None:
            result, results = output, flatten(output)[1]
        else:
            loss = None if target is None and not train else self._loss(output, target)
            result, results = (output, loss), [] if loss is None else [loss]
        if train:
            roots = [tensor for tensor in results if tensor.requires_grad]
            self._ways_back[microbatch] = _WayBack(
                edges=[get_gradient_edge(root) for root in roots],
                shapes=[(root.shape, root.dtype, root.device) for root in roots],
                leaves=[leaf for leaf in leaves if leaf.requires_grad],
            )
        return result

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
        self._run_back(way_back, gradients, inputs=None, keep_graph=False)
        return _take_gradients(way_back.leaves)

    def backward_input(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """Input-gradient half (I): as `backward`, but the parameters wait for `backward_weight`."""
        way_back = self._ways_back[microbatch]
        way_back.gradients = gradients
        if way_back.leaves:
            self._run_back(way_back, gradients, inputs=way_back.leaves, keep_graph=True)
        return _take_gradients(way_back.leaves)

    def backward_weight(self, microbatch: int) -> None:
        """Weight-gradient half (W): adds to the parameters' .grad and frees the microbatch.

        Right, but slow: it walks the way back a second time, so that I + W cost about one I more
        than a full backward, and hooks on activations inside the stage fire twice.
        """
        way_back = self._ways_back.pop(microbatch)
        weights = [p for p in self.module.parameters() if p.requires_grad]
        if weights:
            self._run_back(way_back, way_back.gradients, inputs=weights, keep_graph=False)

    def reset(self) -> None:
        """Forget every live microbatch: a failed step leaves nothing behind."""
        self._ways_back.clear()

    def _run_back(
        self,
        way_back: _WayBack,
        gradients: Gradients | None,
        *,
        inputs: Sequence[torch.Tensor] | None,
        keep_graph: bool,
    ) -> None:
        if gradients is None:  # the last stage: d(step's loss) / d(this microbatch's loss)
            gradients = [
                torch.full(shape, self.loss_weight, dtype=dtype, device=device)
                for shape, dtype, device in way_back.shapes
            ]
        used = [(e, g) for e, g in zip(way_back.edges, gradients, strict=True) if g is not None]
        if used:
            torch.autograd.backward(
                [edge for edge, _ in used],
                [gradient for _, gradient in used],
                inputs=inputs,
                retain_graph=keep_graph,
            )


def _take_gradients(leaves: Sequence[torch.Tensor]) -> Gradients:
    gradients: Gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients
