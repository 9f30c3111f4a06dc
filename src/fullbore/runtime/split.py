"""Split backward: what waits between I and W, and how W turns it into gradients.

I is one ordinary walk of autograd. Products whose weights are caught (`products`) leave input and
output gradient in the queue of their microbatch; everything else (norms, embeddings, products in
unusual forms) gets its gradient in that walk, so what is not caught is right and merely makes W
shorter. W multiplies what was left and hands the results to autograd's own accumulation, so that
hooks see one gradient a weight and microbatch, whichever way it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge
from torch.utils._device import DeviceContext

from fullbore.ir import Kind, Schedule
from fullbore.runtime.products import Product, ProductKind, interception
from fullbore.runtime.waiting import Waiting

__all__ = ["SplitBackward", "SplitReport", "split_backward_of"]

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """What of a stage's trained weights waits for W, and what goes with I.

    queued, with_input: parameter names. The numbers count elements; of matrices alone, and not of
    embeddings, since the other gradients cost next to nothing. A weight that no microbatch used
    stands in with_input.
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


class SplitBackward:
    """The queues of one stage.

    microbatches: those whose backward is split; only they are ever touched.

    The first microbatch in which a weight is caught is a scout: its gradient still goes with I,
    while its graph is searched for uses of the weight in anything but products. A weight with
    such uses goes with I for good, so that its hooks fire once a microbatch.
    """

    def __init__(self, module: nn.Module, *, microbatches: Iterable[int]) -> None:
        self.microbatches = frozenset(microbatches)
        self._embeddings = _embeddings(module)
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._parameters = {id(p): p for p in module.parameters()}
        self.weights = {i: p for i, p in self._parameters.items() if _is_plain(p)}
        self._modules = {id(part) for part in module.modules()}
        self._is_compiled, self._is_catching = _is_compiled(module), False
        interception.prepare()
        self._known: set[int] = set()  # searched for
        self._with_input: set[int] = set()  # used in other ways too
        self._queued: set[int] = set()
        self._waiting: dict[int, Waiting] = {}
        self._current = Waiting()
        self._catching = _Catching(self)
        self._used: dict[int, torch.Tensor] = {}  # what the current action multiplies with
        self._anchors: dict[torch.device, torch.Tensor] = {}

    # -- around a stage's actions ----------------------------------------------------------------

    def forward(self, microbatch: int) -> _Catching:
        """Around the forward of a microbatch."""
        self._current = self._waiting[microbatch] = Waiting()
        return self._catching

    def again(self, microbatch: int) -> _Catching:
        """Around a forward that is repeated: what it meets is treated as it was then."""
        self._current = self._waiting[microbatch]
        return self._catching

    def input_half(self, microbatch: int) -> _Catching:
        """Around I, and whatever is repeated in it."""
        self._current = self._waiting[microbatch]
        self._current.is_open = True
        return self._catching

    def begin(self) -> None:
        """From now on products are caught, on behalf of the current microbatch."""
        self._is_catching = not self._is_compiled and not _is_watched()
        if self._is_catching:
            interception.enter(self)

    def end(self) -> None:
        """No more."""
        if self._is_catching:
            interception.leave(self)
            self._used.clear()
        self._current.is_new = self._current.is_open = False

    def weight_half(self, microbatch: int) -> None:
        """W: add what waits to the weights' .grad, letting go of it weight by weight."""
        waiting = self._waiting.pop(microbatch)
        self._queued.update(waiting.parameters())
        waiting.work_off()

    def reset(self) -> None:
        """Forget what waits: a failed step leaves nothing behind."""
        self._waiting.clear()

    def held(self, microbatch: int) -> Iterator[torch.Tensor]:
        """What waits for W."""
        return self._waiting[microbatch].held()

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
            and forward_ad._current_level < 0
            and not _is_watched()
        ):
            return None
        dtype = _dtype_of_product(x, weight)
        return None if dtype is None else self._multiply(x.to(dtype), weight, bias, kind)

    def defer(self, module: nn.Module, work: Callable[[], None]) -> bool:
        """Put work of one of the stage's modules off until W."""
        if id(module) not in self._modules or not self._current.is_open:
            return False
        self._current.work.append(work)
        return True

    def _can_wait(self, bias: Any) -> bool:
        return bias is None or (
            id(bias) in self.weights and id(bias) not in self._with_input and bias.dim() == 1
        )

    def _multiply(
        self, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, kind: ProductKind
    ) -> torch.Tensor:
        ids = {id(weight)} | ({id(bias)} if bias is not None and bias.requires_grad else set())
        scouts = not ids.isdisjoint(self._current.scouted) or (
            self._current.is_new and not ids <= self._known
        )
        used_weight = self._as_used(weight, x.dtype, scouts=scouts)
        used_bias = None if bias is None else self._as_used(bias, x.dtype, scouts=scouts)
        if scouts:
            self._current.scouted |= ids
            return self._watched(kind.make(x, used_weight, used_bias), ids)
        product = Product(
            kind=kind,
            weight=weight,
            used_weight=used_weight,
            bias=bias if len(ids) > 1 else None,
            used_bias=used_bias,
            hand_over=self._current.take,
        )
        return product.make(x, None if x.requires_grad else self._anchor(x.device))

    def _watched(self, output: torch.Tensor, ids: set[int]) -> torch.Tensor:
        """A scout's product: where a derivative is taken inside the forward, its weights have
        another use there, behind the gate.
        """
        waiting = self._current

        def watch(gradient: torch.Tensor) -> None:
            if not waiting.is_open:
                self._with_input.update(ids)

        output.register_hook(watch)  # type: ignore[no-untyped-call]
        return output

    def _as_used(self, weight: nn.Parameter, dtype: torch.dtype, *, scouts: bool) -> torch.Tensor:
        """A weight as a product takes it: what autocast makes of it, once an action, as autocast.

        scouts: behind a node of its own, by which the search tells products from other uses.
        """
        if weight.dtype == dtype:
            return _gate(weight) if scouts else weight
        used = self._used.get(id(weight))
        if used is None:
            used = (_gate(weight) if scouts else weight.detach()).to(dtype)
            self._used[id(weight)] = used
        return used

    def _anchor(self, device: torch.device) -> torch.Tensor:
        anchor = self._anchors.get(device)
        if anchor is None:
            anchor = self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return anchor

    def search(self, microbatch: int, edges: Iterable[GradientEdge]) -> None:
        """Look for weights that are used outside of products as well, if there are new ones.

        edges: of the forward's results.
        """
        scouted = self._waiting[microbatch].scouted
        if scouted:
            self._with_input |= scouted & _reached(edges)
            self._known |= scouted

    def report(self, stage: int) -> SplitReport:
        """What waited so far, and what went with I."""
        trained = {i: p for i, p in self._parameters.items() if p.requires_grad}
        queued = {i: p for i, p in trained.items() if i in self._queued}
        rest = {i: p for i, p in trained.items() if i not in self._queued}
        return SplitReport(
            stage=stage,
            queued=tuple(self._names[i] for i in queued),
            with_input=tuple(self._names[i] for i in rest),
            queued_matrix_elements=sum(map(self._multiplied, queued.values())),
            with_input_matrix_elements=sum(map(self._multiplied, rest.values())),
        )

    def _multiplied(self, weight: nn.Parameter) -> int:
        """The elements of a matrix; a vector and an embedding multiply nothing."""
        return 0 if weight.dim() < 2 or id(weight) in self._embeddings else weight.numel()


class _Catching:
    """While entered, a stage's products are caught.

    One for all actions of a stage: a generator for each would be new, and cold, in every action.
    """

    __slots__ = ("_split",)

    def __init__(self, split: SplitBackward) -> None:
        self._split = split

    def __enter__(self) -> None:
        self._split.begin()

    def __exit__(self, *_: object) -> None:
        self._split.end()


class _Gate(torch.autograd.Function):
    """A weight on its way into a product of a scout."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has made any part of a stage its own.

    Its graphs hold their own products, and it learns torch's functions by looking them up, which
    must not happen while they are replaced.
    """
    return any(
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
        for part in module.modules()
    )


def _is_watched() -> bool:
    """Whether a TorchFunctionMode is on, which may mean something of its own by torch's functions
    and must see them; that of torch.set_default_device does not.
    """
    number = torch._C._len_torch_function_stack()
    if number == 0:  # as nearly always, and this is asked for each product
        return False
    modes = map(torch._C._get_function_stack_at, range(number))
    return any(type(mode) is not DeviceContext for mode in modes)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether a product with it is what `products` takes it for: real numbers, some of them, and
    of the exact type, since a subclass may mean more by a product than its numbers.
    """
    if type(parameter) is not nn.Parameter:
        return False
    return parameter.is_floating_point() and parameter.numel() > 0


def _gate(weight: nn.Parameter) -> torch.Tensor:
    gated: torch.Tensor = _Gate.apply(weight)  # type: ignore[no-untyped-call]
    return gated


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


def _reached(edges: Iterable[GradientEdge]) -> set[int]:
    """The leaves, by id, whose .grad a walk from these edges adds to but through gates."""
    stack = [edge.node for edge in edges]
    seen, leaves = set(stack), set()
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)  # only what accumulates has one
        if leaf is not None:
            leaves.add(id(leaf))
        for following, _ in node.next_functions:
            is_gate = following is not None and following.name() == "_GateBackward"
            if following is not None and following not in seen and not is_gate:
                seen.add(following)
                stack.append(following)
    return leaves


def _embeddings(module: nn.Module) -> set[int]:
    """Weights, by id, that are only ever looked up in."""
    tables, others = set[int](), set[int]()
    for owner in module.modules():
        found = {id(weight) for weight in owner._parameters.values()}
        if isinstance(owner, nn.Embedding):
            tables |= found
        else:
            others |= found
    return tables - others
