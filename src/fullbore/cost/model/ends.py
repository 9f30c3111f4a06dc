"""The two ends of a model: the embedding, and the head with its norm, logits and loss.

The loss keeps the softmax of the logits in 32 bits: 4·s·b·V bytes, cut over tensor-parallel ranks
(arXiv:2205.05198, section 4.3). Logits that the caller keeps for itself are not counted.

The head's product stays in 16 bits where layers are in 8: Megatron Core's output layer is none of
Transformer Engine's, unless --fp8-output-proj (2026) asks for it.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from fullbore.cost.model.frame import Frame, Part, join, moves
from fullbore.cost.model.linear import entering, leaving, matrix
from fullbore.cost.model.norms import norm
from fullbore.cost.model.piece import Collective, Kept, Weights
from fullbore.cost.model.shape import LatentAttention, ModelShape

__all__ = ["embedding", "head", "vocabulary_rows"]


def vocabulary_rows(shape: ModelShape, *, tensor: int) -> int:
    """Rows of the embedding's matrix on one rank, padding included."""
    return ceil(shape.vocab / (shape.vocab_multiple * tensor)) * shape.vocab_multiple


def embedding(frame: Frame, shape: ModelShape) -> tuple[Part, ...]:
    """A look-up: no product, but parameters, and the ids kept for the gradient."""
    rows = vocabulary_rows(shape, tensor=frame.split.tensor)
    size = frame.cut_tokens * frame.hidden * frame.bytes
    name = "embedding"
    return (
        Part(weights=_tables(frame, shape, rows), kept=_ids(frame, shape)),
        moves(name, forward=(size, size), backward=(size, size)),
        leaving(frame, name, frame.hidden) if frame.split.tensor > 1 else Part(),
        norm(frame, "embedding norm", kind=shape.norm, width=frame.hidden)
        if shape.embedding_norm
        else Part(),
        Part(kept=_dropout(frame)),
    )


def _tables(frame: Frame, shape: ModelShape, rows: int) -> tuple[Weights, ...]:
    tokens = Weights(name="embedding", count=rows * frame.hidden)
    positions = Weights(name="learned positions", count=shape.positions * frame.hidden)
    return (tokens, positions) if shape.positions else (tokens,)


def _ids(frame: Frame, shape: ModelShape) -> tuple[Kept, ...]:
    kept = [Kept(name="token ids", elements=frame.tokens, bytes_each=8.0)]
    if not frame.eager:
        return tuple(kept)
    once = frame.sequence / frame.split.context
    if shape.positions:
        kept.append(Kept(name="positions", elements=once, bytes_each=8.0))
    if width := _rotated(shape):
        kept.append(
            Kept(
                name="cosines and sines of rotary positions",
                elements=2 * once * width,
                bytes_each=frame.bytes,
            )
        )
    return tuple(kept)


def _rotated(shape: ModelShape) -> float:
    attention = shape.layers[0].attention
    if isinstance(attention, LatentAttention):
        return attention.rotary_width
    return attention.width * attention.rotary


def _dropout(frame: Frame) -> tuple[Kept, ...]:
    if not frame.hidden_dropout:
        return ()
    elements = frame.cut_tokens * frame.hidden
    return (Kept(name="embedding dropout mask", elements=elements, bytes_each=1.0),)


def head(frame: Frame, shape: ModelShape) -> tuple[Part, ...]:
    """The last norm, the logits and the loss."""
    rows = vocabulary_rows(shape, tensor=frame.split.tensor)
    last = (
        (norm(frame, "final norm", kind=shape.norm, width=frame.hidden),)
        if shape.final_norm
        else ()
    )
    return (
        *last,
        Part(kept=(replace(frame.stream("logits input"), until="W"),)),
        entering(frame, "logits", frame.hidden, wide=True),
        _logits(frame, shape, rows),
        _loss(frame, shape, rows),
    )


def _logits(frame: Frame, shape: ModelShape, rows: int) -> Part:
    part = matrix(frame, "logits", inner=frame.hidden, columns=rows, wide=True)
    weights = [Weights(name="logits", count=rows * frame.hidden, tied=shape.head.tied)]
    if shape.head.bias:
        weights.append(Weights(name="logits bias", count=rows))
    return Part(products=part.products, grads=part.grads, weights=tuple(weights))


def _loss(frame: Frame, shape: ModelShape, rows: int) -> Part:
    """Softmax and cross-entropy in 32 bits; tensor-parallel ranks agree on three numbers."""
    elements = frame.tokens * rows
    kept = [Kept(name="softmax of the logits", elements=elements, bytes_each=4.0)]
    if frame.eager:
        kept.append(Kept(name="targets", elements=frame.tokens, bytes_each=8.0))
        if shape.head.softcap:
            kept.append(Kept(name="capped logits", elements=elements, bytes_each=frame.bytes))
    passes = 3.0 if frame.eager else 1.0
    read, written = elements * frame.bytes * passes, elements * 4.0 * passes
    traffic = moves("loss", forward=(read, written), backward=(written, read))
    return join(Part(kept=tuple(kept), collectives=_agreement(frame)), traffic)


def _agreement(frame: Frame) -> tuple[Collective, ...]:
    if frame.split.tensor == 1:
        return ()
    return tuple(
        Collective(
            name=name, kind="all_reduce", bytes=frame.tokens * 4.0, group="tensor", action="F"
        )
        for name in ("largest logit", "target's logit", "sum of exponentials")
    )
