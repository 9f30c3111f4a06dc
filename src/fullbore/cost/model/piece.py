"""A piece of a model: what one layer, the embedding or the head costs one rank and one microbatch.

A pipeline is cut between pieces, so a stage costs the sum of its pieces. Nothing here knows a
GPU: products, bytes and messages become seconds elsewhere. All numbers are for one rank of the
tensor-, context- and expert-parallel groups and for one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, TypeVar, get_args

__all__ = [
    "MODULES",
    "Action",
    "Collective",
    "Kept",
    "Kind",
    "Launches",
    "Module",
    "Piece",
    "Product",
    "Traffic",
    "Weights",
    "joined",
]

_T = TypeVar("_T")

Kind = Literal["embedding", "layer", "head"]

# F forward, I input-gradient half of the backward, W weight-gradient half, R computing again what
# recomputation did not keep, just before I.
Action = Literal["F", "I", "W", "R"]

# Parts of a layer, by the names that Megatron-LM's --cuda-graph-modules has for them; `end` is the
# embedding and the head.
Module = Literal["attn", "mlp", "moe_router", "moe_preprocess", "moe", "end"]
MODULES: tuple[Module, ...] = get_args(Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`count` products of a [rows, inner] and an [inner, columns] matrix.

    rows may be a fraction where they are an average (tokens of one expert). share: the part of the
    product that is counted, 1/2 for attention where causality is. weight: whether the second
    matrix is a weight; if not, both are activations. wide: whether it is carried out in 16 bits
    where others are in 8. recomputed: made again before the backward. gathered: which tensor
    tensor-parallel ranks gather from each other before it, so that each casts its part alone: the
    input in F, or the output's gradient in I. parts: how many ranks that is.

    FLOPs are 2·rows·inner·columns·count·share in F, and as much for each gradient: of an
    activation in I, of a weight in W.
    """

    name: str
    rows: float
    inner: int
    columns: int
    count: int = 1
    share: float = 1.0
    weight: bool = True
    wide: bool = False
    recomputed: bool = False
    gathered: Literal["input", "output"] | None = None
    parts: int = 1
    module: Module = "end"

    @property
    def forward_flops(self) -> float:
        """FLOPs of the product itself."""
        return 2.0 * self.rows * self.inner * self.columns * self.count * self.share

    @property
    def input_grad_flops(self) -> float:
        """FLOPs of the gradients of activations: of one factor, or of both without a weight."""
        return self.forward_flops * (1 if self.weight else 2)

    @property
    def weight_grad_flops(self) -> float:
        """FLOPs of the gradient of the weight."""
        return self.forward_flops if self.weight else 0.0

    @property
    def recomputed_flops(self) -> float:
        """FLOPs of making the product again."""
        return self.forward_flops if self.recomputed else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A tensor that stays in memory for the backward.

    elements: on this rank. bytes_each: bytes of one element. until: W where the gradient of a
    weight needs it (the input of a product with a weight), else I.
    """

    name: str
    elements: float
    bytes_each: float
    until: Literal["I", "W"] = "I"

    @property
    def bytes(self) -> float:
        """Bytes of the tensor."""
        return self.elements * self.bytes_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters on this rank.

    group: over which ranks the same parameters are copied (expert-parallel ranks hold different
    experts). tied: this is the embedding's matrix again, so that a model counts it once, and a
    pipeline whose ends are on different ranks holds it twice.
    """

    name: str
    count: float
    group: Literal["dense", "expert"] = "dense"
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Memory that a step without a product moves: norms, activations, sums, a softmax not fused.

    read_bytes, written_bytes: from and to device memory, every operand once. The traffic of
    products follows from their sizes and is not listed here. kernels: that it takes.
    """

    name: str
    read_bytes: float
    written_bytes: float
    action: Action = "F"
    kernels: int = 1
    module: Module = "end"

    @property
    def bytes(self) -> float:
        """Bytes moved in both directions."""
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A message within a tensor-, context- or expert-parallel group.

    bytes: of the whole tensor (what is there before a reduce_scatter, after an all_gather, on every
    rank of an all_reduce); of an all_to_all, what one rank sends, its own share included. A ring of
    n moves (n-1)/n of it a rank, an all_reduce twice that. It is exposed unless it is overlapped.
    copies: how many copies of a token, for as many ranks by chance, an all_to_all counts in its
    bytes and sends only once to each rank and node; 1 where it sends them all. kernels: that it
    takes.
    """

    name: str
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    bytes: float
    group: Literal["tensor", "context", "expert"]
    action: Action
    copies: int = 1
    kernels: int = 1
    module: Module = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """What the host starts, one after another, for one module in one action.

    kernels: products, steps without one, messages. casts: of factors to 8 bits, each of as many
    kernels as the device takes for one.
    """

    module: Module
    action: Action
    kernels: int
    casts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One layer, the embedding or the head.

    index: number of the layer, 0 for the embedding and for the head. kept: tensors held from F to
    the backward. held: what is held instead between I and W: inputs of products with a weight, and
    the gradients of their outputs. rebuilt: tensors that recomputation makes again; they exist only
    while the backward of this piece runs. launches: by module and action.
    """

    kind: Kind
    index: int
    products: tuple[Product, ...] = ()
    kept: tuple[Kept, ...] = ()
    held: tuple[Kept, ...] = ()
    rebuilt: tuple[Kept, ...] = ()
    weights: tuple[Weights, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    collectives: tuple[Collective, ...] = ()
    launches: tuple[Launches, ...] = ()

    @property
    def forward_flops(self) -> float:
        """FLOPs of F."""
        return sum(product.forward_flops for product in self.products)

    @property
    def input_grad_flops(self) -> float:
        """FLOPs of I, without recomputation."""
        return sum(product.input_grad_flops for product in self.products)

    @property
    def weight_grad_flops(self) -> float:
        """FLOPs of W."""
        return sum(product.weight_grad_flops for product in self.products)

    @property
    def recomputed_flops(self) -> float:
        """FLOPs of recomputation: in the hardware's count (HFU), not in the model's (MFU)."""
        return sum(product.recomputed_flops for product in self.products)

    @property
    def parameters(self) -> float:
        """Parameters on this rank, a tied head's matrix included."""
        return sum(weights.count for weights in self.weights)

    @property
    def kept_bytes(self) -> float:
        """Bytes held from F to the backward."""
        return _bytes(self.kept)

    @property
    def kept_until_weight_bytes(self) -> float:
        """The part of `kept_bytes` that W needs."""
        return _bytes(tensor for tensor in self.kept if tensor.until == "W")

    @property
    def held_bytes(self) -> float:
        """Bytes held between I and W of a split backward."""
        return _bytes(self.held)

    @property
    def rebuilt_bytes(self) -> float:
        """Bytes that recomputation makes again while the backward runs."""
        return _bytes(self.rebuilt)


def joined(first: Piece, *others: Piece) -> Piece:
    """The first piece with all that others have."""
    every = (first, *others)
    return replace(
        first,
        products=_all(one.products for one in every),
        kept=_all(one.kept for one in every),
        held=_all(one.held for one in every),
        rebuilt=_all(one.rebuilt for one in every),
        weights=_all(one.weights for one in every),
        traffic=_all(one.traffic for one in every),
        collectives=_all(one.collectives for one in every),
        launches=_all(one.launches for one in every),
    )


def _all(parts: Iterable[tuple[_T, ...]]) -> tuple[_T, ...]:
    return tuple(chain.from_iterable(parts))


def _bytes(tensors: Iterable[Kept]) -> float:
    return sum(tensor.bytes for tensor in tensors)
