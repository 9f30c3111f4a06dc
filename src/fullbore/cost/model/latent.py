"""Multi-head latent attention: keys and values through a narrow matrix (arXiv:2405.04434, 2.1).

Training computes with keys and values of every head, so the core is that of multi-head attention
with queries and keys wider than values. The narrow matrices are whole on every tensor-parallel
rank and work on its part of the sequence, as in Megatron Core; what they make is gathered.
"""

from __future__ import annotations

from fullbore.cost.model.attention import Core, core
from fullbore.cost.model.frame import Frame, Part, again_with, keeping, moves
from fullbore.cost.model.linear import entering, leaving, matrix
from fullbore.cost.model.norms import norm
from fullbore.cost.model.shape import LatentAttention
from fullbore.cost.model.split import RecomputeModule

__all__ = ["latent_attention"]

_UP: RecomputeModule = (
    "mla_up_proj"  # queries, keys and values of all heads, made again from latents
)


def latent_attention(frame: Frame, shape: LatentAttention) -> tuple[Part, ...]:
    """All steps; the input, which the layer's norm made, is kept by the layer."""
    heads = shape.heads // frame.split.tensor
    width = shape.plain_width + shape.rotary_width
    inner = heads * shape.value_width
    out = "attention projection"
    return (
        *_queries(frame, shape, columns=heads * width),
        *_keys_and_values(frame, shape, heads=heads),
        *again_with(_UP, _rotation(frame, shape, heads=heads)),
        *core(
            frame,
            Core(
                heads=heads,
                groups=heads,
                width=width,
                value_width=shape.value_width,
                window=shape.window,
                joined=heads * (shape.plain_width + shape.value_width),
                assembled=True,
                made=frozenset({_UP}),
            ),
        ),
        Part(kept=(frame.whole("attention projection input", inner, until_weight=True),)),
        matrix(frame, out, inner=inner, columns=frame.hidden, bias=shape.bias, gathered="output"),
        leaving(frame, out, frame.hidden),
    )


def _queries(frame: Frame, shape: LatentAttention, *, columns: int) -> tuple[Part, ...]:
    rank = shape.query_rank
    if rank is None:
        whole = matrix(frame, "query", inner=frame.hidden, columns=columns, gathered="input")
        return again_with(_UP, entering(frame, "query", frame.hidden), whole)
    up = matrix(frame, "query up", inner=rank, columns=columns, gathered="input")
    return (
        _down(frame, "query down", columns=rank, bias=shape.bias),
        *_latent(frame, "query", rank, shape),
        *again_with(_UP, up),
    )


def _keys_and_values(frame: Frame, shape: LatentAttention, *, heads: int) -> tuple[Part, ...]:
    columns = heads * (shape.plain_width + shape.value_width)
    down = shape.kv_rank + shape.rotary_width
    up = matrix(frame, "key and value up", inner=shape.kv_rank, columns=columns, gathered="input")
    return (
        _down(frame, "key and value down", columns=down, bias=shape.bias),
        *_latent(frame, "key and value", shape.kv_rank, shape),
        entering(frame, "rotated key", shape.rotary_width),
        *again_with(_UP, up),
    )


def _down(frame: Frame, name: str, *, columns: int, bias: bool) -> Part:
    return matrix(
        frame, name, inner=frame.hidden, columns=columns, bias=bias, rows=frame.cut_tokens
    )


def _latent(frame: Frame, name: str, rank: int, shape: LatentAttention) -> tuple[Part, ...]:
    """The norm between the two matrices, and the input of the second.

    The norm is one kernel with the second matrix, so that both are made again from its input.
    """
    latent = Part(kept=(frame.cut(f"{name} latent", rank, until_weight=True),))
    gathered = again_with(_UP, entering(frame, f"{name} up", rank))
    if not shape.norms:
        return (*gathered, latent)
    normed = keeping(_UP, norm(frame, f"{name} norm", kind="rms", width=rank))
    return (*normed, *gathered, *again_with(_UP, latent))


def _rotation(frame: Frame, shape: LatentAttention, *, heads: int) -> Part:
    """Rotation, and the copies that put rotated and plain parts of queries and keys together."""
    rotated = frame.tokens * shape.rotary_width * (heads + 1) * frame.bytes
    copied = frame.tokens * heads * 2 * (shape.plain_width + shape.rotary_width) * frame.bytes
    size = rotated + copied
    return moves("rotary positions", forward=(size, size), backward=(size, size))
