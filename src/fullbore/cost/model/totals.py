"""Sums over pieces, and the two utilizations that are made of them.

Model FLOPs are what a step needs: F, I and W. Hardware FLOPs count recomputation too. MFU and HFU
divide them by time and by the dense peak (arXiv:2204.02311, appendix B); Narayanan et al. 2021
print HFU with full recomputation, which is 4/3 of MFU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fullbore.cost.model.piece import Piece
from fullbore.cost.model.shape import Experts, ModelShape

__all__ = ["Totals", "active_parameters", "parameters", "totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over pieces, for one rank and one microbatch.

    parameters: a tied head's matrix counts once. kept_bytes, held_bytes: of all pieces at once.
    """

    parameters: float
    forward_flops: float
    input_grad_flops: float
    weight_grad_flops: float
    recomputed_flops: float
    kept_bytes: float
    held_bytes: float
    largest_rebuilt_bytes: float

    @property
    def model_flops(self) -> float:
        """F, I and W."""
        return self.forward_flops + self.input_grad_flops + self.weight_grad_flops

    @property
    def hardware_flops(self) -> float:
        """The same with recomputation."""
        return self.model_flops + self.recomputed_flops


def totals(pieces: Sequence[Piece]) -> Totals:
    """Sums over some pieces of a model, or all."""
    return Totals(
        parameters=parameters(pieces),
        forward_flops=sum(piece.forward_flops for piece in pieces),
        input_grad_flops=sum(piece.input_grad_flops for piece in pieces),
        weight_grad_flops=sum(piece.weight_grad_flops for piece in pieces),
        recomputed_flops=sum(piece.recomputed_flops for piece in pieces),
        kept_bytes=sum(piece.kept_bytes for piece in pieces),
        held_bytes=sum(piece.held_bytes for piece in pieces),
        largest_rebuilt_bytes=max((piece.rebuilt_bytes for piece in pieces), default=0.0),
    )


def parameters(pieces: Iterable[Piece]) -> float:
    """Parameters of pieces that are on one rank together: a tied head's matrix counts once."""
    chosen = list(pieces)
    has_embedding = any(piece.kind == "embedding" for piece in chosen)
    return sum(
        weights.count
        for piece in chosen
        for weights in piece.weights
        if not (weights.tied and has_embedding)
    )


def active_parameters(shape: ModelShape, pieces: Sequence[Piece]) -> float:
    """Parameters that one token meets: of a mixture, the experts that it is sent to.

    pieces: of the whole model on one rank, unsplit.
    """
    idle = 0.0
    for layer, piece in zip(shape.layers, pieces[1:-1], strict=True):
        if isinstance(layer.mlp, Experts):
            experts = sum(w.count for w in piece.weights if w.group == "expert")
            idle += experts * (1 - layer.mlp.chosen / layer.mlp.count)
    return parameters(pieces) - idle
