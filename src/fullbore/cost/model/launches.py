"""How many kernels the host starts for each module of a piece, in each action.

Kernels are started one after another by one thread, and where they are short the device waits for
it. What is counted is what a price is made of: a product with a weight is one an expert, a step
without a product and a message as many as they say, and in 8 bits each factor is cast once: the
input in F, the gradient of the output in I. A fused attention is one kernel in F and three in I (a
sum over its output, the gradients, and theirs in 16 bits).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fullbore.cost.model.frame import Frame, Part
from fullbore.cost.model.piece import Action, Launches, Module, Product

__all__ = ["launches"]

_ACTIONS: tuple[Action, ...] = ("F", "I", "W")
_FUSED_ATTENTION = {"F": 1, "I": 3, "W": 0}


def launches(frame: Frame, parts: Sequence[Part], again: Sequence[Part]) -> tuple[Launches, ...]:
    """Of a piece's parts by module and action; again: those that recomputation makes again."""
    told: dict[tuple[Module, Action], Launches] = {}
    for found in (*_made(frame, parts), *_made_again(frame, again)):
        key = (found.module, found.action)
        before = told.get(key, Launches(module=found.module, action=found.action, kernels=0))
        told[key] = Launches(
            module=found.module,
            action=found.action,
            kernels=before.kernels + found.kernels,
            casts=before.casts + found.casts,
        )
    return tuple(one for one in told.values() if one.kernels or one.casts)


def _made(frame: Frame, parts: Iterable[Part]) -> Iterator[Launches]:
    for part in parts:
        for action in _ACTIONS:
            yield Launches(
                module=part.module,
                action=action,
                kernels=_products(frame, part, action) + _others(frame, part, action),
                casts=_casts(frame, part, action),
            )


def _made_again(frame: Frame, parts: Iterable[Part]) -> Iterator[Launches]:
    for part in parts:
        yield Launches(
            module=part.module,
            action="R",
            kernels=_products(frame, part, "F") + _others(frame, part, "F"),
            casts=_casts(frame, part, "F"),
        )


def _products(frame: Frame, part: Part, action: Action) -> int:
    """With a weight, one a matrix; all heads of an attention are one batch."""
    kernels = sum(product.count for product in part.products if product.weight)
    between = [product for product in part.products if not product.weight]
    if between and frame.kernels.flash:
        return kernels + _FUSED_ATTENTION[action]
    each = {"F": 1, "I": 2, "W": 0}[action]
    return kernels + each * len(between)


def _others(frame: Frame, part: Part, action: Action) -> int:
    """Steps without a product, and messages; unfused, sums into gradients too."""
    steps = sum(traffic.kernels for traffic in part.traffic if traffic.action == action)
    messages = sum(message.kernels for message in part.collectives if message.action == action)
    sums = len(part.weights) if action == "W" and frame.eager else 0
    return steps + messages + sums


def _casts(frame: Frame, part: Part, action: Action) -> int:
    if action == "W" or not frame.precision.is_narrow:
        return 0
    return sum(_cast(product) for product in part.products)


def _cast(product: Product) -> int:
    return product.count if product.weight and not product.wide else 0
