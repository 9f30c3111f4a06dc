"""Mixtures of experts: router, the way of tokens to experts and back, the experts themselves.

Tokens are taken to be spread evenly. Kept for each of the k experts that a token is sent to: its
copy of the input (h), gate and up (2f), their product (f) and the output before it is weighed (h).
Megatron-LM takes a token's copies to their experts by an all_to_all, and gathers them over the
ranks that one expert's width is cut over, if it is.
"""

from __future__ import annotations

from typing import Literal

from fullbore.cost.model.frame import Frame, Part, again_with, moves, within
from fullbore.cost.model.linear import matrix
from fullbore.cost.model.mlp import activated, activation_traffic, mlp
from fullbore.cost.model.piece import Action, Collective, Kept, Product, Weights
from fullbore.cost.model.shape import Experts

__all__ = ["experts"]

# Kernels of Megatron Core's router and dispatchers, estimated from what they do and not taken from
# a profile: only about right, and `launch_s`, fitted with them, takes up the rest. Of a fused
# router in F and I: scores in 32 bits, top-k, map of tokens, loads, a loss that balances them. Of
# counts: sums a expert and a rank, gathered over ranks, and copies to the host, which DeepEP and
# HybridEP do in kernels of their own. Of a copy sorted one way: an index and the copy itself.
_ROUTER_KERNELS = (8, 6)
_COUNT_KERNELS = {"alltoall": 12, "flex": 3}
_SORT_KERNELS = 2


def experts(frame: Frame, shape: Experts) -> tuple[Part, ...]:
    """All steps; the input, which the layer's norm made, is kept by the layer."""
    return again_with(
        "moe",
        *within("moe_router", _router(frame, shape)),
        *within("moe_preprocess", [_counts(frame, shape)]),
        *within("moe", (_dispatch(frame, shape), *_matrices(frame, shape))),
        *within("moe_router", again_with("shared_experts", *_shared(frame, shape))),
    )


def _pairs(frame: Frame, shape: Experts) -> float:
    """Copies of tokens that this rank's experts work on, one for each expert of a token."""
    return frame.tokens / frame.split.tensor * shape.chosen * frame.split.width_of_experts


def _router(frame: Frame, shape: Experts) -> tuple[Part, ...]:
    name = "router"
    rows = frame.cut_tokens
    scores = Kept(name="router scores", elements=rows * shape.count, bytes_each=4.0)
    product = matrix(
        frame,
        name,
        inner=frame.hidden,
        columns=shape.count,
        bias=shape.router_bias,
        rows=rows,
        wide=True,
    )
    size = rows * shape.count * 4.0
    return (
        product,
        Part(kept=(scores, *_choices(frame, shape))),
        moves(
            name,
            forward=(2 * size, size),
            backward=(2 * size, size),
            kernels=_ROUTER_KERNELS,
        ),
    )


def _counts(frame: Frame, shape: Experts) -> Part:
    """How many tokens each expert gets, from each rank: a mask of bytes is read and summed."""
    mask = frame.cut_tokens * shape.count
    kernels = _COUNT_KERNELS[frame.kernels.dispatcher]
    return moves("token counts", forward=(mask, mask), backward=(0.0, 0.0), kernels=(kernels, 0))


def _choices(frame: Frame, shape: Experts) -> tuple[Kept, ...]:
    """What an unfused router keeps of its choice: indices of 64 bits and weights of 32."""
    if not frame.eager:
        return ()
    chosen = frame.cut_tokens * shape.chosen
    copied = frame.unfused.router_32 and frame.bytes < 4.0
    elements = frame.cut_tokens * frame.hidden if copied else 0.0
    copy = Kept(name="router input, 32 bits", elements=elements, bytes_each=4.0, until="W")
    return (
        *((copy,) if copied else ()),
        Kept(name="chosen experts", elements=chosen, bytes_each=8.0),
        Kept(name="chosen weights", elements=chosen, bytes_each=4.0),
        Kept(name="sum of weights", elements=frame.cut_tokens, bytes_each=4.0),
    )


def _dispatch(frame: Frame, shape: Experts) -> Part:
    """Messages and copies on the way to the experts and back, in F and again in I."""
    sent = frame.tokens / frame.split.tensor * shape.chosen * frame.hidden * frame.bytes
    told: list[Collective] = []
    once = frame.kernels.dispatcher == "flex"
    if frame.split.expert > 1:
        copies = shape.chosen if once else 1
        told += _both_ways("all_to_all", "all_to_all", sent, "expert", copies=copies)
    if frame.split.width_of_experts > 1:
        whole = sent * frame.split.width_of_experts
        told += _both_ways("all_gather", "reduce_scatter", whole, "tensor")
    # Each reads and writes all copies: sorted before they leave and put together at the end, and
    # on a rank of several experts that copies reach from others sorted by expert, and back. What
    # is sent once to a rank is multiplied and sorted there, and nowhere else.
    many = frame.split.expert > 1 and shape.count > frame.split.expert and not once
    sorts = 2 if many else 1
    size = 2 * sorts * _pairs(frame, shape) * frame.hidden * frame.bytes
    kernels = 2 * sorts * _SORT_KERNELS
    sorted_ = moves(
        "permutation", forward=(size, size), backward=(size, size), kernels=(kernels, kernels)
    )
    return Part(collectives=tuple(told), traffic=sorted_.traffic)


_MessageKind = Literal["all_gather", "reduce_scatter", "all_to_all"]


def _both_ways(
    there: _MessageKind,
    back: _MessageKind,
    size: float,
    group: Literal["tensor", "expert"],
    *,
    copies: int = 1,
) -> list[Collective]:
    """On the way there a copy's weight travels beside it, in a message of its own."""
    actions: tuple[Action, ...] = ("F", "I")
    told = (("tokens to experts", there, 2), ("tokens from experts", back, 1))
    return [
        Collective(
            name=name,
            kind=kind,
            bytes=size,
            group=group,
            action=action,
            copies=copies,
            kernels=kernels,
        )
        for action in actions
        for name, kind, kernels in told
    ]


def _matrices(frame: Frame, shape: Experts) -> tuple[Part, ...]:
    pairs, local = _pairs(frame, shape), shape.count // frame.split.expert
    width = shape.width // frame.split.width_of_experts
    first = "experts gate and up" if shape.gated else "experts up"
    inside = activated(
        frame,
        "experts",
        elements=pairs * width,
        gated=shape.gated,
        activation=shape.activation,
    )
    return (
        Part(
            kept=(_kept(frame, "experts input", pairs, until_weight=True), *_indices(frame, pairs))
        ),
        _grouped(
            frame, shape, first, inner=frame.hidden, columns=width * (2 if shape.gated else 1)
        ),
        Part(kept=inside[:-1]),
        *again_with(
            "moe_act",
            activation_traffic(frame, "experts", elements=pairs * width, gated=shape.gated),
            Part(kept=inside[-1:]),
        ),
        _grouped(frame, shape, "experts down", inner=width, columns=frame.hidden),
        Part(kept=_outputs(frame, pairs)),
        Part(weights=_biases(shape, local, first, width, frame.hidden) if shape.bias else ()),
    )


def _outputs(frame: Frame, pairs: float) -> tuple[Kept, ...]:
    """Outputs before they are weighed; unfused, the sum over experts keeps its terms too."""
    kept = _kept(frame, "experts output", pairs, until_weight=False)
    if not frame.eager:
        return (kept,)
    return (kept, _kept(frame, "experts weighed output", pairs, until_weight=False))


def _kept(frame: Frame, name: str, pairs: float, *, until_weight: bool) -> Kept:
    each = frame.precision.product_input if until_weight else frame.bytes
    elements = pairs * frame.hidden
    return Kept(name=name, elements=elements, bytes_each=each, until="W" if until_weight else "I")


def _indices(frame: Frame, pairs: float) -> tuple[Kept, ...]:
    """Unfused, each copy keeps which token and which choice it is, and its weight."""
    if not frame.eager:
        return ()
    return (
        Kept(name="token and choice of a copy", elements=2 * pairs, bytes_each=8.0),
        Kept(name="weight of a copy", elements=pairs, bytes_each=frame.bytes),
    )


def _grouped(frame: Frame, shape: Experts, name: str, *, inner: int, columns: int) -> Part:
    """One product an expert that this rank has."""
    pairs, local = _pairs(frame, shape), shape.count // frame.split.expert
    product = Product(name=name, rows=pairs / local, inner=inner, columns=columns, count=local)
    return Part(
        products=(product,),
        grads=(frame.grad(name, pairs * columns),),
        weights=(Weights(name=name, count=local * inner * columns, group="expert"),),
    )


def _biases(shape: Experts, local: int, first: str, width: int, hidden: int) -> tuple[Weights, ...]:
    inner = width * (2 if shape.gated else 1)
    return (
        Weights(name=f"{first} bias", count=local * inner, group="expert"),
        Weights(name="experts down bias", count=local * hidden, group="expert"),
    )


def _shared(frame: Frame, shape: Experts) -> tuple[Part, ...]:
    if shape.shared is None:
        return ()
    parts = mlp(frame, shape.shared, name="shared expert")
    if not shape.shared_gate:
        return parts
    gate = matrix(frame, "shared expert gate", inner=frame.hidden, columns=1, rows=frame.cut_tokens)
    kept = [frame.stream("shared expert output"), frame.cut("shared expert sigmoid", 1)]
    return (*parts, gate, Part(kept=tuple(kept)))
