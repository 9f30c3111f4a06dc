"""From pieces to a costs file: each stage is the sum of its pieces, priced by a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullbore.cost.costs import Costs
from fullbore.cost.hardware.roofline import Priced, Roofline
from fullbore.cost.model.piece import Piece

__all__ = ["stage_costs"]


def stage_costs(
    roofline: Roofline, stages: Sequence[Sequence[Piece]], *, message_bytes: float
) -> Costs:
    """Costs of a pipeline whose stage s holds the pieces stages[s], in the model's order.

    Recomputation counts in the backward, as part of I. message_bytes: of one message between
    stages, on one rank. Pieces that share their parts, as `pieces` makes them, are priced once.
    """
    sums: dict[tuple[int, ...], _Sums] = {}

    def summed(piece: Piece) -> _Sums:
        # By identity, not by value: to hash a piece is to hash hundreds of numbers.
        parts = (
            *(piece.products, piece.kept, piece.held),
            *(piece.traffic, piece.collectives, piece.launches),
        )
        alike = tuple(map(id, parts))
        if alike not in sums:
            sums[alike] = _summed(roofline, piece)
        return sums[alike]

    return Costs.parse(
        {
            "stages": [_stage([summed(piece) for piece in stage]) for stage in stages],
            "hop_s": roofline.layout.hop_s,
            "message_bytes": message_bytes,
            "bandwidth_bytes_per_s": roofline.layout.hop_bytes_per_s,
        },
        where="priced costs",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """A piece's seconds and bytes."""

    price: Priced
    kept_bytes: float
    held_bytes: float
    rebuilt_bytes: float


def _summed(roofline: Roofline, piece: Piece) -> _Sums:
    return _Sums(
        price=roofline.priced(piece),
        kept_bytes=piece.kept_bytes,
        held_bytes=piece.held_bytes,
        rebuilt_bytes=piece.rebuilt_bytes,
    )


def _stage(pieces: Sequence[_Sums]) -> dict[str, float]:
    rebuilt = max((piece.rebuilt_bytes for piece in pieces), default=0.0)
    return {
        "forward_s": sum(piece.price.forward_s for piece in pieces),
        "input_grad_s": sum(piece.price.input_grad_s for piece in pieces),
        "weight_grad_s": sum(piece.price.weight_grad_s for piece in pieces),
        "activation_bytes": sum(piece.kept_bytes for piece in pieces),
        "input_grad_held_bytes": sum(piece.held_bytes for piece in pieces) + rebuilt,
    }
