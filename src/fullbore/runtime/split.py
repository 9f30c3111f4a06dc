"""Split backward: what waits between I and W, and how W turns it into gradients.

I is one ordinary walk of autograd. Products whose weights are caught (`products`) leave input and
output gradient in the queue of their microbatch; everything else (norms, embeddings, products in
unusual forms) gets its gradient in that walk, so what is not caught is right and merely makes W
shorter. W multiplies what was left and hands the results to autograd's own accumulation, so that
hooks see one gradient a weight and microbatch, whichever way it came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from fullbore.ir import Kind, Schedule
from fullbore.runtime.products import Product, ProductKind, interception

__all__ = ["SplitBackward", "SplitReport", "split_backward_of"]

_PLAIN = (torch.Tensor, nn.Parameter)

# Calling autograd costs as much as the product of a small weight, so gradients are handed to it
# in groups; all at once would hold a copy of the stage.
_GROUP_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """What of a stage's trained weights waits for W, and what goes with I.

    queued, with_input: parameter names. The numbers count elements; of matrices alone, since a
    vector's gradient costs next to nothing. A weight that no microbatch used stands in with_input.
    """

    stage: int
    queued: tuple[str, ...]
    with_input: tuple[str, ...]
    queued_matrix_elements: int
    with_input_matrix_elements: int

    @property
    def share_with_input(self) -> float:
        """Of the matrices' elements, and so of W's multiplications, the part that I does."""
        total = self.queued_matrix_elements + self.with_input_matrix_elements
        return self.with_input_matrix_elements / total if total else 0.0


@dataclass(slots=True, kw_only=True)
class _Parts:
    """One product between I and W."""

    product: Product
    x: torch.Tensor  # [..., in]
    gradient: torch.Tensor  # [..., out], of the output


@dataclass(slots=True, kw_only=True)
class _Gradient:
    """What a microbatch adds to one parameter's .grad."""

    parameter: nn.Parameter
    value: torch.Tensor


@dataclass(slots=True, kw_only=True)
class _Waiting:
    """One microbatch. is_open: its I is running, so what products hand over is kept."""

    is_open: bool = False
    weights: set[int] = field(default_factory=set)  # of the products that its forward made
    parts: dict[int, list[_Parts]] = field(default_factory=dict)  # by weight, as I came to them

    def take(self, product: Product, x: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.is_open:
            parts = _Parts(product=product, x=x.detach(), gradient=gradient.detach())
            self.parts.setdefault(id(product.weight), []).append(parts)


class SplitBackward:
    """The queues of one stage.

    microbatches: those whose backward is split; only they are ever touched.
    """

    def __init__(self, module: nn.Module, *, microbatches: Iterable[int]) -> None:
        self.microbatches = frozenset(microbatches)
        self._names = {id(p): name for name, p in module.named_parameters()}
        # exact type: a subclass may mean more by a product than its numbers
        self.weights = {id(p): p for p in module.parameters() if type(p) is nn.Parameter}
        self._with_input = _shared_with_others(module)
        self._examined: set[int] = set()  # weights known to be used in products only
        self._queued: set[int] = set()
        self._waiting: dict[int, _Waiting] = {}
        self._current = _Waiting()
        self._casts: dict[int, torch.Tensor] = {}
        self._anchors: dict[torch.device, torch.Tensor] = {}

    # -- around a stage's actions ----------------------------------------------------------------

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around the forward of a microbatch, and around its recomputation."""
        self._current = self._waiting.setdefault(microbatch, _Waiting())
        yield from self._catching()

    @contextmanager
    def input_half(self, microbatch: int) -> Iterator[None]:
        """Around I; modules that are recomputed in it are caught as they were in the forward."""
        self._current = self._waiting.setdefault(microbatch, _Waiting())
        self._current.is_open = True
        try:
            yield from self._catching()
        finally:
            self._current.is_open = False
            self._queued.update(self._current.parts)

    def _catching(self) -> Iterator[None]:
        interception.enter(self)
        try:
            yield
        finally:
            interception.leave(self)
            self._casts.clear()

    def weight_half(self, microbatch: int) -> None:
        """W: add what waits to the weights' .grad, letting go of it weight by weight."""
        parts = self._waiting.pop(microbatch).parts
        group: list[_Gradient] = []
        with torch.no_grad():
            while parts:
                group.extend(_gradients_of(parts.pop(next(iter(parts)))))
                if sum(gradient.value.nbytes for gradient in group) >= _GROUP_BYTES:
                    _accumulate(group)
                    group = []
            _accumulate(group)

    def reset(self) -> None:
        """Forget what waits: a failed step leaves nothing behind."""
        self._waiting.clear()

    def held(self, microbatch: int) -> Iterator[torch.Tensor]:
        """What waits for W."""
        for parts in self._waiting[microbatch].parts.values():
            for one in parts:
                yield one.x
                yield one.gradient

    # -- catching --------------------------------------------------------------------------------

    def catch(
        self, x: Any, weight: nn.Parameter, bias: Any, *, kind: ProductKind
    ) -> torch.Tensor | None:
        """The product by way of the queue; None where it is of a kind that goes with I."""
        if not (
            weight.requires_grad
            and torch.is_grad_enabled()
            and type(x) in _PLAIN
            and x.dim() >= 2
            and id(weight) not in self._with_input
            and self._can_wait(bias)
            and not torch._C._are_functorch_transforms_active()
        ):
            return None
        dtype = _dtype_of_product(x, weight)
        return None if dtype is None else self._multiply(x, weight, bias, kind, dtype)

    def _can_wait(self, bias: Any) -> bool:
        return bias is None or (
            id(bias) in self.weights and id(bias) not in self._with_input and bias.dim() == 1
        )

    def _multiply(
        self,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        kind: ProductKind,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        waiting = self._current
        waiting.weights.add(id(weight))
        waits = bias is not None and bias.requires_grad
        if waits:
            waiting.weights.add(id(bias))
        product = Product(
            kind=kind,
            weight=weight,
            used_weight=self._cast(weight, dtype),
            bias=bias if waits else None,
            used_bias=None if bias is None else self._cast(bias, dtype),
            hand_over=waiting.take,
        )
        x = x.to(dtype)
        return product.make(x, None if x.requires_grad else self._anchor(x.device))

    def _cast(self, weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        """What autocast makes of a weight, once for each forward, as autocast itself would."""
        if weight.dtype == dtype:
            return weight
        cast = self._casts.get(id(weight))
        if cast is None:
            cast = self._casts[id(weight)] = weight.detach().to(dtype)
        return cast

    def _anchor(self, device: torch.device) -> torch.Tensor:
        anchor = self._anchors.get(device)
        if anchor is None:
            anchor = self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return anchor

    # -- weights that are used in other ways too ---------------------------------------------------

    def examine(self, microbatch: int, edges: Iterable[GradientEdge]) -> None:
        """Look, once for each weight, whether a forward used it outside of its products as well.

        Such a weight goes with I from the next forward on, so that its hooks fire once a
        microbatch. edges: of the forward's results.
        """
        made = self._waiting[microbatch].weights
        if not made <= self._examined:
            self._with_input |= made & _reached(edges)
            self._examined |= made

    def report(self, stage: int) -> SplitReport:
        """What waited so far, and what went with I."""
        trained = {i: p for i, p in self.weights.items() if p.requires_grad}
        queued = {i: p for i, p in trained.items() if i in self._queued}
        rest = {i: p for i, p in trained.items() if i not in self._queued}
        return SplitReport(
            stage=stage,
            queued=tuple(self._names[i] for i in queued),
            with_input=tuple(self._names[i] for i in rest),
            queued_matrix_elements=_matrix_elements(queued.values()),
            with_input_matrix_elements=_matrix_elements(rest.values()),
        )


def split_backward_of(schedule: Schedule, stage: int, module: nn.Module) -> SplitBackward | None:
    """The queues of a stage; None where no backward of it is split."""
    program = schedule.programs[schedule.placement.stage_to_rank[stage]]
    microbatches = program.microbatch[(program.kind == Kind.I) & (program.stage == stage)]
    return SplitBackward(module, microbatches=microbatches.tolist()) if len(microbatches) else None


def _dtype_of_product(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """What a product is made in; None where torch's function shall decide, or refuse."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x.dtype if x.dtype == weight.dtype else None
    if torch.float64 in (x.dtype, weight.dtype) or not x.is_floating_point():
        return None  # autocast leaves these alone
    return torch.get_autocast_dtype(device)


def _shared_with_others(module: nn.Module) -> set[int]:
    """Weights that several modules own, of which one makes no product of it: tied embeddings."""
    owners: dict[int, list[nn.Module]] = {}
    for owner in module.modules():
        for weight in owner._parameters.values():
            if weight is not None:
                owners.setdefault(id(weight), []).append(owner)
    return {
        weight
        for weight, modules in owners.items()
        if len(modules) > 1 and not all(isinstance(owner, nn.Linear) for owner in modules)
    }


def _reached(edges: Iterable[GradientEdge]) -> set[int]:
    """The leaves, by id, whose .grad a walk from these edges adds to."""
    stack = [edge.node for edge in edges]
    seen, leaves = set(stack), set()
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)  # only what accumulates has one
        if leaf is not None:
            leaves.add(id(leaf))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return leaves


def _matrix_elements(weights: Iterable[nn.Parameter]) -> int:
    return sum(weight.numel() for weight in weights if weight.dim() > 1)


def _gradients_of(parts: Iterable[_Parts]) -> Iterator[_Gradient]:
    """The gradients of one weight and of the biases that it was used with.

    parts: as I came to them, which is the order in which autograd adds up.
    """
    sums: dict[int, _Gradient] = {}
    for one in parts:
        product = one.product
        found = [(product.weight, product.kind.weight_gradient(one.x, one.gradient))]
        if product.bias is not None:
            found.append((product.bias, product.kind.bias_gradient(one.gradient)))
        for parameter, gradient in found:
            before = sums.get(id(parameter))
            if before is not None:
                before.value += gradient
            else:
                sums[id(parameter)] = _Gradient(parameter=parameter, value=gradient)
    yield from sums.values()


def _accumulate(gradients: list[_Gradient]) -> None:
    """Add to .grad by autograd's own accumulation, with every hook that hangs on it."""
    if gradients:
        torch.autograd.Variable._execution_engine.run_backward(  # torch.autograd.backward, quicker
            tuple(gradient.parameter for gradient in gradients),
            tuple(gradient.value.to(gradient.parameter.dtype) for gradient in gradients),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )
