"""Matrices with weights, and the messages where a tensor-parallel region begins and ends.

Megatron-LM cuts the first matrix of attention and of an MLP by columns and the second by rows
(arXiv:1909.08053). Without sequence parallelism the region costs an all_reduce in F at its end and
one in I at its beginning; with it (arXiv:2205.05198, section 4.2.2) each becomes a reduce_scatter
and an all_gather, and W gathers the input once more, since only this rank's part of it was kept.
What is gathered is the factor of a product, in as many bits as products take: Transformer Engine
casts it to 8 bits before it gathers. What is summed travels in the bits between products.
"""

from __future__ import annotations

from typing import Literal

from fullbore.cost.model.frame import Frame, Part
from fullbore.cost.model.piece import Action, Collective, Product, Weights

__all__ = ["entering", "leaving", "matrix"]

_Told = tuple[tuple[Literal["all_reduce", "all_gather", "reduce_scatter"], Action], ...]
_GATHERED: _Told = (("all_gather", "F"), ("reduce_scatter", "I"), ("all_gather", "W"))
_SCATTERED: _Told = (("reduce_scatter", "F"), ("all_gather", "I"))


def matrix(
    frame: Frame,
    name: str,
    *,
    inner: int,
    columns: int,
    bias: bool = False,
    rows: float | None = None,
    wide: bool = False,
    gathered: Literal["input", "output"] | None = None,
) -> Part:
    """A product [rows, inner] x [inner, columns] with a weight, as large as this rank has it.

    rows: T where not given. wide: as in `Product`. gathered: the same, where the sequence is cut.
    The input is not in it: several matrices may share one.
    """
    rows = frame.tokens if rows is None else rows
    cut = gathered is not None and frame.split.sequence_parallel
    weights = [Weights(name=name, count=inner * columns)]
    if bias:
        weights.append(Weights(name=f"{name} bias", count=columns))
    return Part(
        products=(
            Product(
                name=name,
                rows=rows,
                inner=inner,
                columns=columns,
                wide=wide,
                gathered=gathered if cut else None,
                parts=frame.split.tensor if cut else 1,
            ),
        ),
        grads=(frame.grad(name, rows * columns),),
        weights=tuple(weights),
    )


def entering(frame: Frame, name: str, width: int, *, wide: bool = False) -> Part:
    """Messages where [C, width] becomes the input of matrices that are cut by columns.

    wide: as in `Product`.
    """
    if frame.split.sequence_parallel:
        return _messages(frame, f"{name} input", width, _GATHERED, wide=wide)
    return _messages(frame, f"{name} input", width, (("all_reduce", "I"),))


def leaving(frame: Frame, name: str, width: int) -> Part:
    """Messages where the outputs of a matrix that is cut by rows become [C, width]."""
    if frame.split.sequence_parallel:
        return _messages(frame, f"{name} output", width, _SCATTERED)
    return _messages(frame, f"{name} output", width, (("all_reduce", "F"),))


def _messages(frame: Frame, name: str, width: int, told: _Told, *, wide: bool = False) -> Part:
    if frame.split.tensor == 1:
        return Part()
    elements = frame.tokens * width
    factor = frame.bytes if wide else frame.precision.product_input
    return Part(
        collectives=tuple(
            Collective(
                name=name,
                kind=kind,
                bytes=elements * (factor if kind == "all_gather" else frame.bytes),
                group="tensor",
                action=action,
            )
            for kind, action in told
        )
    )
