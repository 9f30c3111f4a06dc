"""One stage at work: forward and backward of one microbatch through a module, by autograd.

After a forward only the way back is kept: the gradient edges of the outputs and the leaves that
the inputs became. The output itself lives as long as its message, or as autograd needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fullbore.errors import PipelineError
from fullbore.runtime.host import Mark
from fullbore.runtime.layout import flatten
from fullbore.runtime.offload import Left, Offload
from fullbore.runtime.recompute import Recomputation
from fullbore.runtime.slices import CARRY, Carry, taken_apart
from fullbore.runtime.split import SplitBackward

__all__ = [
    "CountFunction",
    "Gradients",
    "LossFunction",
    "StageRunner",
    "guarded",
    "was_changed",
]

LossFunction = Callable[[Any, Any], torch.Tensor]
CountFunction = Callable[[Any], float | torch.Tensor]
Gradients = list[torch.Tensor | None]


@dataclass(slots=True, kw_only=True)
class _WayBack:
    """What the backward of one microbatch needs: nothing else of the forward is kept."""

    edges: list[GradientEdge]  # of the outputs that want a gradient, or of the loss
    leaves: list[torch.Tensor]  # the inputs that want a gradient
    loss: torch.Tensor | None  # on the last stage


class _Enter(torch.autograd.Function):
    """Turns a received leaf into a tensor that the stage may change in place, without a copy."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def guarded(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a stage is given for leaves that it may change in place; costs a graph node each."""
    return [_Enter.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]  # type: ignore[no-untyped-call]


def was_changed(given: Sequence[torch.Tensor]) -> bool:
    """Whether a stage has changed anything in place of what `guarded` gave it."""
    return any(tensor.requires_grad and tensor._version for tensor in given)


class StageRunner:
    """Runs one stage's module and holds what its live microbatches need for their backward.

    Not thread-safe; one microbatch at a time. `loss_fn` belongs to the last stage, and so does
    `loss_weight`, the step's loss derived by that of one microbatch; it may change between steps.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        loss_fn: LossFunction | None,
        loss_weight: float,
        split: SplitBackward | None = None,
        recomputation: Recomputation | None = None,
        offload: Offload | None = None,
        carry: Carry | None = None,
    ) -> None:
        """split: the queues of a stage of which any backward is split. recomputation: what of it
        is dropped after a forward and made again. offload: what of it leaves for the host. carry:
        what goes from slice to slice, where a microbatch is a slice.
        """
        self.module = module
        self.split, self.recomputation, self._offload = split, recomputation, offload
        self._carry = carry
        self._loss_fn, self.loss_weight = loss_fn, loss_weight
        self._ways_back: dict[int, _WayBack] = {}

    def forward(
        self,
        microbatch: int,
        value: Any,
        leaves: Sequence[torch.Tensor],
        kwargs: dict[str, Any],
        target: Any,
        train: bool,  # noqa: FBT001
    ) -> Any:
        """Run the module; returns its output (on the last stage the pair of output and loss,
        the loss None where there is no target to an evaluation).

        value: the stage's input; a tuple is given as several arguments. leaves: its tensors, as
        they arrived; those that want a gradient get it in `backward`.
        """
        if self._carry is not None:
            kwargs = {**kwargs, CARRY: self._carry.arrived(microbatch)}
        given = value, kwargs, target
        if not train:
            result = self._call(given, has_loss=target is not None)
            return result if self._carry is None else self._hand_on(microbatch, result)
        split = self._split_of(microbatch)
        if split is None:
            return self._run(microbatch, given, leaves)
        with split.forward(microbatch):
            result = self._run(microbatch, given, leaves)
        edges = self._ways_back[microbatch].edges
        if self._carry is not None:
            edges = [*edges, *self._carry.edges(microbatch)]
        split.search(microbatch, edges)
        return result

    def _split_of(self, microbatch: int) -> SplitBackward | None:
        split = self.split
        return split if split is not None and microbatch in split.microbatches else None

    def _run(self, microbatch: int, given: Any, leaves: Sequence[torch.Tensor]) -> Any:
        """Call for training, and remember the way back."""
        if self._offload is None:
            result = self._computed(microbatch, given)
        else:
            with self._offload.forward(microbatch):
                result = self._computed(microbatch, given)
        if self._carry is not None:
            result = self._hand_on(microbatch, result)
        if self._loss_fn is None:
            results = [result] if isinstance(result, torch.Tensor) else flatten(result)[1]
            self._remember(microbatch, results, leaves, loss=None)
            return result
        output, loss = result
        self._remember(microbatch, [loss], leaves, loss=loss)
        return output, loss

    def _computed(self, microbatch: int, given: Any) -> Any:
        """What `_call` gives, in such a way that what is dropped of it can be made again."""
        if self.recomputation is None:
            return self._call(given)
        return self.recomputation.run(microbatch, self._call, given)

    def _call(self, given: Any, *, has_loss: bool = True) -> Any:
        """The module, and the loss behind it on the last stage; given: value, kwargs, target."""
        value, kwargs, target = given
        arguments = value if isinstance(value, tuple) else (value,)
        output = self.module(*arguments, **kwargs)
        if self._carry is not None:
            output = taken_apart(output)
        if self._loss_fn is None:
            return output
        return output, self._loss(output, target) if has_loss else None

    def _hand_on(self, microbatch: int, result: Any) -> Any:
        """What `_call` gives, without what the next slice gets of it."""
        assert self._carry is not None
        if self._loss_fn is None:
            output, carry = result
            self._carry.hand_on(microbatch, carry)
            return output
        (output, carry), loss = result
        self._carry.hand_on(microbatch, carry)
        return output, loss

    def _remember(
        self,
        microbatch: int,
        results: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        *,
        loss: torch.Tensor | None,
    ) -> None:
        self._ways_back[microbatch] = _WayBack(
            edges=[_edge_of(tensor) for tensor in results if tensor.requires_grad],
            leaves=[leaf for leaf in leaves if leaf.requires_grad],
            loss=loss,
        )

    def _loss(self, output: Any, target: Any) -> torch.Tensor:
        assert self._loss_fn is not None
        loss = self._loss_fn(output if self._carry is None else output[0], target)
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
        if self._offload is not None:
            self._offload.arrive(microbatch)
        self._run_back(microbatch, way_back, gradients)
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

    def offloads(self, microbatch: int) -> bool:
        """Whether what a microbatch's forward saves leaves for the host."""
        return self._offload is not None and microbatch in self._offload.microbatches

    def offload(self, microbatch: int, mark: Mark | None) -> Left:
        """OFFLOAD: what its forward has saved begins to leave. mark: at both ends of the copy."""
        assert self._offload is not None
        return self._offload.leave(microbatch, self._ways_back[microbatch].leaves, mark)

    def reload(self, microbatch: int, mark: Mark | None) -> Left:
        """RELOAD: it begins to come back."""
        assert self._offload is not None
        return self._offload.come_back(microbatch, mark)

    def kept(self, microbatch: int) -> Iterator[torch.Tensor]:
        """What a microbatch's forward keeps where hooks of its own stand in for autograd's: to be
        recomputed from, or until it leaves for the host.
        """
        for part in (self.recomputation, self._offload):
            if part is not None:
                yield from part.kept(microbatch)

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
        if self._offload is not None:
            self._offload.reset()
        if self._carry is not None:
            self._carry.reset()

    def _run_back(
        self,
        microbatch: int,
        way_back: _WayBack,
        gradients: Gradients | None,
    ) -> None:
        edges = way_back.edges
        if way_back.loss is not None:  # d(step's loss) / d(this microbatch's loss)
            gradients = [torch.full_like(way_back.loss, self.loss_weight)] if edges else []
        assert gradients is not None
        if self._carry is not None:
            edges, gradients = self._carry.with_returned(microbatch, edges, gradients)
        if any(gradient is None for gradient in gradients):
            used = [(e, g) for e, g in zip(edges, gradients, strict=True) if g is not None]
            edges, gradients = [edge for edge, _ in used], [gradient for _, gradient in used]
        if edges:
            _run_engine(edges, gradients)


def _edge_of(tensor: torch.Tensor) -> GradientEdge:
    """As `get_gradient_edge`, but without its Python for what is no Python function's output."""
    node = tensor.grad_fn
    written_in_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    if node is None or written_in_python:
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def _run_engine(
    edges: Sequence[GradientEdge],
    gradients: Gradients,
) -> None:
    """What torch.autograd.backward comes to.

    On CPU without its Python, which takes as long as a small stage's whole backward: checks of
    what is right by construction here, and a copy of the context variables for threads that only
    CUDA's backward has.
    """
    if gradients[0] is not None and gradients[0].is_cuda:
        torch.autograd.backward(edges, gradients)
        return
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(edges),
        tuple(gradients),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs: all
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _take_gradients(leaves: Sequence[torch.Tensor]) -> Gradients:
    gradients: Gradients = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients
