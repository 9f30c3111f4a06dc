"""Attention, grouped or multi-head: projections, scores, softmax, values, output.

Kept for the backward, in elements a token unless written (a heads, g groups, d width, s sequence):
queries a·d, keys and values g·d each, the output a·d (the input of the last matrix), and with
flash attention one 32-bit number a head (arXiv:2205.14135), else the softmax a·s. Dropout of the
softmax adds a mask and its own output, a·s each (arXiv:2205.05198, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fullbore.cost.model.frame import Frame, Part, again_with, join, moves
from fullbore.cost.model.linear import entering, leaving, matrix
from fullbore.cost.model.norms import norm
from fullbore.cost.model.piece import Action, Collective, Kept, Product, Weights
from fullbore.cost.model.shape import Attention
from fullbore.cost.model.split import RecomputeModule

__all__ = ["Core", "attention", "core", "counted_share"]

# Reads and writes of the scores in F where nothing is fused: scale, mask, softmax, cast.
_UNFUSED_PASSES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """What lies between the projections, as much of it as this rank has.

    width: of a query and a key, value_width: of a value. window, softcap: as in `Attention`.
    joined: width of the tensor that unfused values are a view of, 0 for their own. assembled:
    whether unfused queries are put together of a rotated part and another. made: the module that
    makes queries, keys and values again.
    """

    heads: int
    groups: int
    width: int
    value_width: int
    window: int | None = None
    softcap: bool = False
    joined: int = 0
    assembled: bool = False
    made: frozenset[RecomputeModule] = frozenset()


def attention(frame: Frame, shape: Attention) -> tuple[Part, ...]:
    """All steps; the input, which the layer's norm made, is kept by the layer."""
    cut = frame.split.tensor
    heads, groups = shape.heads // cut, max(1, shape.groups // cut)
    inner, assembled = heads * shape.width, frame.unfused.assembled
    whole = Core(
        heads=heads,
        groups=groups,
        width=shape.width,
        value_width=shape.width,
        window=shape.window,
        softcap=shape.softcap,
        joined=shape.width * (heads + 2 * groups) if frame.unfused.joint_qkv else 0,
        assembled=0 < shape.rotary < 1 if assembled is None else assembled,
    )
    qkv, out = "attention query, key, value", "attention projection"
    return (
        entering(frame, qkv, frame.hidden),
        matrix(
            frame,
            qkv,
            inner=frame.hidden,
            columns=shape.width * (heads + 2 * groups),
            bias=shape.qkv_bias,
            gathered="input",
        ),
        *_qk_norms(frame, shape, heads=heads, groups=groups),
        _rotation(frame, elements=frame.tokens * shape.width * (heads + groups), shape=shape),
        Part(weights=(Weights(name="attention sinks", count=heads),) if shape.sinks else ()),
        *core(frame, whole),
        Part(kept=(frame.whole("attention projection input", inner, until_weight=True),)),
        matrix(
            frame,
            out,
            inner=inner,
            columns=frame.hidden,
            bias=shape.out_bias,
            gathered="output",
        ),
        leaving(frame, out, frame.hidden),
    )


def _qk_norms(frame: Frame, shape: Attention, *, heads: int, groups: int) -> tuple[Part, ...]:
    if shape.qk_norm == "none":
        return ()
    parts = []
    for name, count in (("query norm", heads), ("key norm", groups)):
        over = shape.width * count if shape.qk_norm == "all" else shape.width
        rows = frame.tokens * (1 if shape.qk_norm == "all" else count)
        learned = shape.width * count if shape.qk_norm == "each_head" else None
        parts.append(
            norm(frame, name, kind=shape.qk_norm_kind, width=over, rows=rows, learned=learned)
        )
    return tuple(parts)


def _rotation(frame: Frame, *, elements: float, shape: Attention) -> Part:
    size = elements * shape.rotary * frame.bytes
    return moves("rotary positions", forward=(size, size), backward=(size, size))


def core(frame: Frame, shape: Core) -> tuple[Part, ...]:
    """Scores, softmax and values; its inputs stay where it is made again."""
    return (
        Part(kept=_inputs(frame, shape), again=shape.made),
        *again_with(
            "core_attn",
            Part(
                products=_products(frame, shape),
                kept=(*_outputs(frame, shape), *_scores(frame, shape)),
                collectives=_exchange(frame, shape),
            ),
            _softmax_traffic(frame, shape),
        ),
    )


def counted_share(*, sequence: int, window: int | None, causal: bool) -> float:
    """The part of the scores that counts as work.

    causal: a token looks back at half of the sequence on average, s/2; within a window of w at
    w - w²/2s (both leave out half a token). Otherwise at all of it, or at the whole window.
    """
    reach = sequence if window is None else min(window, sequence)
    seen = reach - reach * reach / (2 * sequence) if causal else reach
    return seen / sequence


def _products(frame: Frame, shape: Core) -> tuple[Product, ...]:
    rows = frame.sequence / frame.split.context
    count = frame.microbatch * shape.heads
    share = counted_share(sequence=frame.sequence, window=shape.window, causal=frame.causal)
    return (
        Product(
            name="attention scores",
            rows=rows,
            inner=shape.width,
            columns=frame.sequence,
            count=count,
            share=share,
            weight=False,
        ),
        Product(
            name="attention values",
            rows=rows,
            inner=frame.sequence,
            columns=shape.value_width,
            count=count,
            share=share,
            weight=False,
        ),
    )


def _inputs(frame: Frame, shape: Core) -> tuple[Kept, ...]:
    """Queries, keys and values."""
    if frame.eager:
        return _unfused_inputs(frame, shape)
    return (
        frame.whole("queries", shape.heads * shape.width),
        frame.whole("keys", shape.groups * shape.width),
        frame.whole("values", shape.groups * shape.value_width),
    )


def _outputs(frame: Frame, shape: Core) -> tuple[Kept, ...]:
    """The kernel's own output, where the product that follows keeps another copy of it."""
    # Unfused, a query that was put together lies head by head, and so does the kernel's output.
    narrower = frame.precision.product_input != frame.bytes
    if not frame.kernels.flash or not (shape.assembled if frame.eager else narrower):
        return ()
    return (frame.whole("attention output", shape.heads * shape.value_width),)


def _unfused_inputs(frame: Frame, shape: Core) -> tuple[Kept, ...]:
    """Without flash attention, keys and values are copied out to every head."""
    flash = frame.kernels.flash
    groups = shape.groups if flash else shape.heads
    each = 4.0 if frame.unfused.scores_32 and not flash else frame.bytes
    kept = [
        replace(frame.whole("queries", shape.heads * shape.width), bytes_each=each),
        replace(frame.whole("keys", groups * shape.width), bytes_each=each),
    ]
    if flash and shape.joined:
        kept.append(frame.whole("values, and what they are a view of", shape.joined))
    else:
        kept.append(frame.whole("values", groups * shape.value_width))
    return tuple(kept)


def _scores(frame: Frame, shape: Core) -> tuple[Kept, ...]:
    if frame.kernels.flash:
        elements = frame.tokens * shape.heads
        return (Kept(name="softmax statistics", elements=elements, bytes_each=4.0),)
    elements = frame.tokens * frame.sequence * shape.heads
    kept = [Kept(name="softmax", elements=elements, bytes_each=frame.bytes)]
    if frame.eager and frame.bytes < 4.0 and frame.unfused.softmax_32:
        kept.append(Kept(name="softmax, 32 bits", elements=elements, bytes_each=4.0))
    if shape.softcap and frame.eager:
        kept.append(Kept(name="capped scores", elements=elements, bytes_each=frame.bytes))
    if frame.attention_dropout:
        kept.append(Kept(name="softmax dropout mask", elements=elements, bytes_each=1.0))
        kept.append(Kept(name="softmax after dropout", elements=elements, bytes_each=frame.bytes))
    return tuple(kept)


def _softmax_traffic(frame: Frame, shape: Core) -> Part:
    if frame.kernels.flash:
        return Part()
    passes = _UNFUSED_PASSES if frame.eager else 1.0
    elements = frame.tokens * frame.sequence * shape.heads
    size = elements * frame.bytes * passes
    part = moves("softmax", forward=(size, size), backward=(2 * size, size))
    if frame.attention_dropout:
        size = elements * frame.bytes
        dropout = moves(
            "softmax dropout",
            forward=(size, size + elements),
            backward=(size + elements, size),
        )
        part = join(part, dropout)
    return part


def _exchange(frame: Frame, shape: Core) -> tuple[Collective, ...]:
    """Keys and values that context-parallel ranks show each other, and their gradients."""
    if frame.split.context == 1:
        return ()
    width = shape.groups * (shape.width + shape.value_width)
    size = float(frame.sequence * frame.microbatch * width * frame.bytes)
    told: tuple[tuple[Literal["all_gather", "reduce_scatter"], Action], ...] = (
        ("all_gather", "F"),
        ("all_gather", "I"),
        ("reduce_scatter", "I"),
    )
    return tuple(
        Collective(name="keys and values", kind=kind, bytes=size, group="context", action=action)
        for kind, action in told
    )
