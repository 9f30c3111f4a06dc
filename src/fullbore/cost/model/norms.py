"""Norms, residual sums and dropout: no products, but tensors kept and memory moved.

A fused norm keeps its input; Hugging Face's RMSNorm, run one operation after another, keeps the
input in 32 bits, the normalized input, and one number a token (`x.float() · rsqrt(mean(x²) + ε)`,
then `weight · …`). Statistics of fused norms, 4 or 8 bytes a token, are left out, as they are in
published formulas: under 0.1 % of a layer.
"""

from __future__ import annotations

from fullbore.cost.model.frame import Frame, Part, join, moves
from fullbore.cost.model.piece import Kept, Weights
from fullbore.cost.model.shape import Norm

__all__ = ["norm", "residual"]

_VECTORS = {"rms": 1, "layer": 2, "centered": 1, "bare": 0}
_STATISTICS = {"rms": 4.0, "layer": 8.0, "centered": 4.0, "bare": 8.0}

# Reads and writes of the whole input in F: once where fused; an unfused RMSNorm is six operations.
_UNFUSED_PASSES = 6.0


def norm(
    frame: Frame,
    name: str,
    *,
    kind: Norm,
    width: int,
    rows: float | None = None,
    learned: int | None = None,
    keeps_input: bool = True,
) -> Part:
    """A norm over `width` of each of `rows` vectors (C where not given).

    Its output is kept by what reads it. learned: elements of one of its vectors, width where not
    given. keeps_input: False where another norm has kept the same input.
    """
    rows = frame.cut_tokens if rows is None else rows
    count = _VECTORS[kind] * (width if learned is None else learned)
    size = rows * width * frame.bytes
    spelled = frame.eager and kind in ("rms", "centered")
    passes = _UNFUSED_PASSES if spelled else 1.0
    kept = _kept(frame, name, kind, rows, width) if keeps_input else ()
    return join(
        Part(kept=kept, weights=(Weights(name=name, count=count),) if count else ()),
        moves(
            name,
            forward=(size * passes, size * passes),
            backward=(2 * size * passes, size * passes),
        ),
    )


def _kept(frame: Frame, name: str, kind: Norm, rows: float, width: int) -> tuple[Kept, ...]:
    elements = rows * width
    if not frame.eager:
        return (Kept(name=f"{name} input", elements=elements, bytes_each=frame.bytes),)
    statistics = Kept(name=f"{name} statistics", elements=rows, bytes_each=_STATISTICS[kind])
    if kind in ("layer", "bare"):
        each = frame.bytes if kind == "layer" else 4.0
        return (Kept(name=f"{name} input", elements=elements, bytes_each=each), statistics)
    return (
        Kept(name=f"{name} input, 32 bits", elements=elements, bytes_each=4.0),
        statistics,
        Kept(name=f"{name} normalized", elements=elements, bytes_each=frame.bytes),
    )


def residual(frame: Frame, name: str) -> Part:
    """Dropout, where there is any, and the sum with the residual stream."""
    elements = frame.cut_tokens * frame.hidden
    size = elements * frame.bytes
    mask = Kept(name=f"{name} dropout mask", elements=elements, bytes_each=1.0)
    return join(
        Part(kept=(mask,) if frame.hidden_dropout else ()),
        moves(
            f"{name} residual",
            forward=(2 * size, size + (elements if frame.hidden_dropout else 0.0)),
            backward=(2 * size, size),
        ),
    )
