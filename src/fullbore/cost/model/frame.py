"""What pricing a step needs to know besides its shape, and the token counts that follow from it.

T  tokens of one microbatch on this rank where widths are cut: s·b / cp
C  tokens where the sequence is cut too: T / t with sequence parallelism, else T
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

from fullbore.cost.model.piece import Action, Collective, Kept, Module, Product, Traffic, Weights
from fullbore.cost.model.shape import Unfused
from fullbore.cost.model.split import Kernels, Precision, RecomputeModule, Split

__all__ = ["Frame", "Part", "again_with", "join", "keeping", "moves", "within"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One rank's view of one microbatch.

    sequence: s, tokens of a sequence before any cut. microbatch: b. causal: whether the half of
    the scores that the mask hides goes uncounted. hidden: h.
    """

    hidden: int
    split: Split
    sequence: int
    microbatch: int
    precision: Precision
    kernels: Kernels
    causal: bool
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    unfused: Unfused = field(default_factory=Unfused)

    @property
    def tokens(self) -> float:
        """T."""
        return self.sequence * self.microbatch / self.split.context

    @property
    def cut_tokens(self) -> float:
        """C."""
        cut = self.split.tensor if self.split.sequence_parallel else 1
        return self.tokens / cut

    @property
    def eager(self) -> bool:
        """Whether operations run one after another, unfused."""
        return self.kernels.style == "eager"

    @property
    def bytes(self) -> float:
        """Bytes of an element between products."""
        return self.precision.activation

    def stream(self, name: str, *, until_weight: bool = False) -> Kept:
        """A tensor of the residual stream's size, [C, h]."""
        return self.cut(name, self.hidden, until_weight=until_weight)

    def cut(self, name: str, width: float, *, until_weight: bool = False) -> Kept:
        """A tensor [C, width]."""
        return self._tensor(name, self.cut_tokens * width, until_weight=until_weight)

    def whole(self, name: str, width: float, *, until_weight: bool = False) -> Kept:
        """A tensor [T, width]."""
        return self._tensor(name, self.tokens * width, until_weight=until_weight)

    def grad(self, name: str, elements: float) -> Kept:
        """The gradient of a product's output, held until W."""
        return Kept(
            name=f"{name} output gradient", elements=elements, bytes_each=self.bytes, until="W"
        )

    def _tensor(self, name: str, elements: float, *, until_weight: bool) -> Kept:
        if until_weight:
            each = self.precision.product_input
            return Kept(name=name, elements=elements, bytes_each=each, until="W")
        return Kept(name=name, elements=elements, bytes_each=self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One step of a piece, such as the projection of queries, keys and values.

    grads: gradients of the outputs of products, held between I and W. again: the modules of
    selective recomputation that make it again, so that what it keeps is dropped and F repeated.
    feeds: the module that is made again from what it keeps. module: what a CUDA graph would
    capture it with.
    """

    products: tuple[Product, ...] = ()
    kept: tuple[Kept, ...] = ()
    grads: tuple[Kept, ...] = ()
    weights: tuple[Weights, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    collectives: tuple[Collective, ...] = ()
    again: frozenset[RecomputeModule] = frozenset()
    feeds: RecomputeModule | None = None
    module: Module = "end"


def again_with(module: RecomputeModule, *parts: Part) -> tuple[Part, ...]:
    """Parts that are made again with a module, besides those that they had."""
    return tuple(replace(part, again=part.again | {module}) for part in parts)


def keeping(module: RecomputeModule, part: Part) -> tuple[Part, ...]:
    """A part that is made again with a module from what it keeps, which therefore stays."""
    return (Part(kept=part.kept), *again_with(module, replace(part, kept=())))


def within(module: Module, parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts, as those of a module that a CUDA graph captures."""
    return tuple(replace(part, module=module) for part in parts)


def join(*parts: Part) -> Part:
    """All of several parts that no module makes again, as one."""
    return Part(
        products=tuple(chain.from_iterable(part.products for part in parts)),
        kept=tuple(chain.from_iterable(part.kept for part in parts)),
        grads=tuple(chain.from_iterable(part.grads for part in parts)),
        weights=tuple(chain.from_iterable(part.weights for part in parts)),
        traffic=tuple(chain.from_iterable(part.traffic for part in parts)),
        collectives=tuple(chain.from_iterable(part.collectives for part in parts)),
    )


def moves(
    name: str,
    *,
    forward: tuple[float, float],
    backward: tuple[float, float],
    kernels: tuple[int, int] = (1, 1),
) -> Part:
    """The traffic of a step without a product: bytes (read, written) in F and in I.

    kernels: in F and in I.
    """
    told: tuple[tuple[Action, tuple[float, float], int], ...] = (
        ("F", forward, kernels[0]),
        ("I", backward, kernels[1]),
    )
    return Part(
        traffic=tuple(
            Traffic(name=name, read_bytes=read, written_bytes=written, action=action, kernels=count)
            for action, (read, written), count in told
            if read or written
        )
    )
