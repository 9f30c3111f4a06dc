"""Products: the matrix products of linear layers, caught on their way so that their weights wait.

While a stage works on a microbatch whose backward is split, `torch.nn.functional.linear` and
`torch.addmm` (which transformers' Conv1D calls) are replaced by functions that ask the stage's
`Catcher` whether the weight is one of its own. If so the product is made by an autograd function
whose backward gives the input's gradient only and hands input and output gradient over; anything
else goes to torch's own function untouched, and its weight gradient comes with the input's.

Why the functions are replaced, and only then. A `TorchFunctionMode` sees every torch call of a
forward and costs 5 to 8 us for each on the CPU at hand: +40 % on the forward of a Llama block of
64 dimensions, where replacing two functions costs less than can be measured. Changing modules or
their classes would be seen by their owner. The weight's identity decides, not the thread, since
recomputation calls modules from autograd's own threads on CUDA.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Catcher", "Interception", "Product", "interception"]


class Catcher(Protocol):
    """Who catches products: a stage at work on one microbatch."""

    weights: dict[int, nn.Parameter]  # by id

    def catch(
        self, x: torch.Tensor, weight: nn.Parameter, bias: Any, *, kind: ProductKind
    ) -> torch.Tensor | None:
        """The product, or None: torch's own function shall make it."""

    def defer(self, module: nn.Module, work: Callable[[], None]) -> bool:
        """Put work off until W; False where the module is another's, or no I is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKind:
    """How a product is made: output = x @ weight.T (linear) or x @ weight (addmm), plus bias."""

    transposed: bool  # whether the weight is [out, in]
    make: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]

    def weight_gradient(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """From x [..., in] and the output's gradient [..., out]: as autograd computes it."""
        rows, of_rows = _matrix(x), _matrix(gradient)
        return of_rows.t().mm(rows) if self.transposed else rows.t().mm(of_rows)

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """[out] from the output's gradient [..., out]."""
        return gradient.sum(tuple(range(gradient.dim() - 1)))


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


class Interception:
    """Replaces torch's two functions while any catcher is at work.

    Torch's functions are one set a process, so there is one of these (`interception`) however
    many pipelines a process has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: tuple[Catcher, ...] = ()
        self._linear, self._addmm = functional.linear, torch.addmm
        self.linear_kind = ProductKind(transposed=True, make=self._linear)
        self.addmm_kind = ProductKind(transposed=False, make=self._make_addmm)

    @staticmethod
    def prepare() -> None:
        """Before the first `enter`: torch.compile learns torch's functions by looking them up once,
        when it is first imported, which must not be while they are replaced.

        Most processes have it by then, since making an optimizer or a checkpoint imports it.
        """
        importlib.import_module("torch._dynamo")

    def enter(self, catcher: Catcher) -> None:
        """From now on until `leave` the catcher is asked."""
        with self._lock:
            if not self._active:
                self._linear, self._addmm = functional.linear, torch.addmm
                functional.linear, torch.addmm = self._catch_linear, self._catch_addmm
            self._active = (*self._active, catcher)

    def leave(self, catcher: Catcher) -> None:
        """Torch's own functions come back when the last catcher has left."""
        with self._lock:
            active = self._active
            rest = () if active == (catcher,) else (one for one in active if one is not catcher)
            self._active = tuple(rest)
            if not self._active:
                functional.linear, torch.addmm = self._linear, self._addmm

    def defer(self, module: nn.Module, work: Callable[[], None]) -> bool:
        """For a module of which no product is caught: from inside its backward, put the part that
        only its weights need off until W. False where the backward is whole: do it now.
        """
        return any(catcher.defer(module, work) for catcher in self._active)

    def _catch_linear(self, input: Any, weight: Any, bias: Any = None) -> Any:
        product = self._catch(input, weight, bias, self.linear_kind)
        return self._linear(input, weight, bias) if product is None else product

    def _catch_addmm(self, *args: Any, **kwargs: Any) -> Any:
        product = None
        if len(args) == 3 and not kwargs:
            product = self._catch(args[1], args[2], args[0], self.addmm_kind)
        return self._addmm(*args, **kwargs) if product is None else product

    def _catch(self, x: Any, weight: Any, bias: Any, kind: ProductKind) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            return None  # a compiled graph keeps torch's own products
        for catcher in self._active:
            if id(weight) in catcher.weights:
                return catcher.catch(x, weight, bias, kind=kind)
        return None

    def _make_addmm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert bias is not None
        return self._addmm(bias, x, weight)


# The one exception to "no globals": what it replaces is global, and two of it would restore each
# other's replacements.
interception = Interception()


@dataclass(slots=True, kw_only=True)
class Product:
    """One caught product: which weight, what it is multiplied as, and who waits for its parts.

    hand_over: called with (product, x, output gradient) when its backward runs.
    """

    kind: ProductKind
    weight: nn.Parameter
    used_weight: torch.Tensor  # the weight itself, or what autocast made of it
    bias: nn.Parameter | None
    used_bias: torch.Tensor | None
    hand_over: Callable[[Product, torch.Tensor, torch.Tensor], None]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """Those whose gradients wait."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def make(self, x: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        """The product of x [..., in].

        anchor: a leaf that wants a gradient and gets none, where x wants none: the output must
        lead back here all the same.
        """
        output: torch.Tensor = _Multiply.apply(x, anchor, self)  # type: ignore[no-untyped-call]
        return output


class _Multiply(torch.autograd.Function):
    """x, anchor, product -> output. The weight is no input: nothing leads to its .grad in I.

    Small stages are made of little else, so tensors are reshaped once and never copied.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, product: Product
    ) -> torch.Tensor:
        # as a matrix, and without what x leads back to: so it is what waits for W
        ctx.save_for_backward(_as_matrix(x), product.used_weight)
        ctx.set_materialize_grads(False)
        ctx.product = product
        output = product.kind.make(x, product.used_weight, product.used_bias)
        # with a bias torch gives a view of a matrix, which nobody could change in place behind this
        return output.data if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        product: Product = ctx.product
        of_rows = _as_matrix(gradient)
        product.hand_over(product, x, of_rows)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        if of_rows.dim() > 2:
            of_rows = gradient.reshape(-1, gradient.shape[-1])
        result = of_rows.mm(weight if product.kind.transposed else weight.t())
        if gradient.dim() > 2:
            result = result.view(*gradient.shape[:-1], result.shape[1])  # there may be no rows
        return result, None, None


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """[..., n] as [rows, n] where that needs no copy; else as it is, but leading back nowhere."""
    if tensor.dim() == 2 or not tensor.is_contiguous():
        return tensor.detach()
    return tensor.detach().view(-1, tensor.shape[-1])
