"""What surrounds a layer that predicts a further token (multi-token prediction, arXiv:2412.19437).

As Megatron Core has it (`transformer/multi_token_prediction.py`), on the stage of the head: the
tokens one place on are embedded once more, normed and joined with the normed hidden states by a
product [2h, h]; one more layer follows, a norm, and the head's matrix again, with its own loss.
"""

from __future__ import annotations

from fullbore.cost.model.ends import head, vocabulary_rows
from fullbore.cost.model.frame import Frame, Part, moves
from fullbore.cost.model.linear import entering, leaving, matrix
from fullbore.cost.model.norms import norm
from fullbore.cost.model.piece import Weights
from fullbore.cost.model.shape import ModelShape

__all__ = ["around_further_layer"]


def around_further_layer(frame: Frame, shape: ModelShape) -> tuple[Part, ...]:
    """All of it but the layer. Embedding and head are matrices that are there already, but for an
    embedding that only the first stage has: its copy counts as a tied one.
    """
    size = frame.cut_tokens * frame.hidden * frame.bytes
    rows = vocabulary_rows(shape, tensor=frame.split.tensor)
    copy = Weights(name="embedding again", count=rows * frame.hidden, tied=True)
    name, width = "further token", 2 * frame.hidden
    return (
        Part(weights=() if shape.head.tied else (copy,)),
        moves(f"{name} embedding", forward=(size, size), backward=(size, size)),
        norm(frame, f"{name} embedding norm", kind=shape.norm, width=frame.hidden),
        norm(frame, f"{name} norm", kind=shape.norm, width=frame.hidden),
        Part(kept=(frame.cut(f"{name} input", width, until_weight=True),)),
        entering(frame, name, width),
        matrix(
            frame, name, inner=width, columns=frame.hidden // frame.split.tensor, gathered="input"
        ),
        leaving(frame, name, frame.hidden),
        *(_without_weights(part) for part in head(frame, shape)),
    )


def _without_weights(part: Part) -> Part:
    """The head's matrix is shared; the norm before it is another one."""
    weights = tuple(one for one in part.weights if not one.name.startswith("logits"))
    return Part(
        products=part.products,
        kept=part.kept,
        grads=part.grads,
        weights=weights,
        traffic=part.traffic,
        collectives=part.collectives,
    )
