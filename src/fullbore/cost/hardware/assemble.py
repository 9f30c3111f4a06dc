"""From pieces to a costs file: each stage is the sum of its pieces, priced by a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fullbore.cost.costs import Costs
from fullbore.cost.hardware.roofline import Priced, Roofline
from fullbore.cost.model.piece import Piece

__all__ = ["stage_costs"]


def stage_costs(
    roofline: Roofline, stages: Sequence[Sequence[Piece]], *, message_bytes: float
) -> Costs:
    """Costs of a pipeline whose stage s holds the pieces stages[s], in the model's order.

    Recomputation counts in the backward, as part of I. message_bytes: of one message between
    stages, on one rank. Layers that cost the same are priced once.
    """
    prices: dict[Piece, Priced] = {}

    def price(piece: Piece) -> Priced:
        alike = replace(piece, index=0)
        if alike not in prices:
            prices[alike] = roofline.priced(alike)
        return prices[alike]

    return Costs.parse(
        {
            "stages": [_stage(stage, [price(piece) for piece in stage]) for stage in stages],
            "hop_s": roofline.layout.hop_s,
            "message_bytes": message_bytes,
            "bandwidth_bytes_per_s": roofline.layout.hop_bytes_per_s,
        },
        where="priced costs",
    )


def _stage(pieces: Sequence[Piece], prices: Sequence[Priced]) -> dict[str, float]:
    rebuilt = max((piece.rebuilt_bytes for piece in pieces), default=0.0)
    return {
        "forward_s": sum(price.forward_s for price in prices),
        "input_grad_s": sum(price.input_grad_s for price in prices),
        "weight_grad_s": sum(price.weight_grad_s for price in prices),
        "activation_bytes": sum(piece.kept_bytes for piece in pieces),
        "input_grad_held_bytes": sum(piece.held_bytes for piece in pieces) + rebuilt,
    }
