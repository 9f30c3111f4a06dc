"""What waits between I and W for one microbatch, and how W turns it into gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from fullbore.runtime.products import Product

__all__ = ["Waiting"]

# Calling autograd costs as much as the product of a small weight, so gradients are handed to it
# in groups; all at once would hold a copy of the stage.
_GROUP_BYTES = 1 << 24


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
class Waiting:
    """One microbatch.

    is_open: its I is running, so what products hand over is kept. scouted: weights, by id, of
    which it is the first that meets them, and whose gradients go with its I. parts: by weight,
    as I came to them.
    """

    is_open: bool = False
    is_new: bool = True
    scouted: set[int] = field(default_factory=set)
    parts: dict[int, list[_Parts]] = field(default_factory=dict)
    work: list[Callable[[], None]] = field(default_factory=list)  # put off by modules themselves

    def take(self, product: Product, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """What a product hands over in its backward."""
        if self.is_open:
            parts = _Parts(product=product, x=x, gradient=gradient)
            self.parts.setdefault(id(product.weight), []).append(parts)

    def parameters(self) -> Iterator[int]:
        """The parameters, by id, whose gradients wait."""
        for parts in self.parts.values():
            for one in parts:
                yield from map(id, one.product.parameters)

    def work_off(self) -> None:
        """W: add what waits to the weights' .grad, letting go of it weight by weight."""
        for work in self.work:
            work()
        group: list[_Gradient] = []
        size = 0
        with torch.no_grad():
            while self.parts:
                found = _gradients_of(self.parts.pop(next(iter(self.parts))))
                group.extend(found)
                size += sum(gradient.value.nbytes for gradient in found)
                if size >= _GROUP_BYTES:
                    _accumulate(group)
                    group, size = [], 0
            _accumulate(group)

    def held(self) -> Iterator[torch.Tensor]:
        """The tensors that wait."""
        for parts in self.parts.values():
            for one in parts:
                yield one.x
                yield one.gradient


def _gradients_of(parts: Iterable[_Parts]) -> list[_Gradient]:
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
    return list(sums.values())


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
