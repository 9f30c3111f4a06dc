"""Bytes of parameters, gradients and optimizer states on one rank.

With Adam in mixed precision a parameter costs 18 bytes: 2 the weight, 4 an accumulated gradient of
32 bits, 4 the optimizer's own weight, 8 its two moments (arXiv:1910.02054, section 3.1, has 16 with
a gradient of 16 bits). Ranks that hold the same parameters can share out the optimizer's part,
then gradients, then the parameters themselves, which is what ZeRO stages 1 to 3 do: with the first
a parameter costs 6 + 12/n bytes over n such ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fullbore.cost.model.piece import Piece, Weights
from fullbore.cost.model.split import Precision, Split
from fullbore.errors import ConfigError

__all__ = ["Sharding", "States", "states", "states_of_pieces"]

# Megatron-LM's names (--data-parallel-sharding-strategy).
Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

_DEPTH: dict[str, int] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes that stay on one rank from step to step."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def bytes(self) -> float:
        """All of them."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    def __add__(self, other: States) -> States:
        return States(
            weights_bytes=self.weights_bytes + other.weights_bytes,
            gradients_bytes=self.gradients_bytes + other.gradients_bytes,
            optimizer_bytes=self.optimizer_bytes + other.optimizer_bytes,
        )


def states(parameters: float, precision: Precision, *, sharding: Sharding, copies: int) -> States:
    """What so many parameters of one rank cost where `copies` ranks hold the same ones.

    Raises ConfigError for an unknown sharding, or fewer than one copy.
    """
    if sharding not in _DEPTH:
        raise ConfigError(f"no sharding is called {sharding!r}: {', '.join(_DEPTH)}")
    if copies < 1:
        raise ConfigError(f"{copies} ranks that hold the same parameters: there is at least one")
    depth = _DEPTH[sharding]

    def over(least: int) -> int:
        return copies if depth >= least else 1

    return States(
        weights_bytes=parameters * precision.weight / over(3),
        gradients_bytes=parameters * precision.gradient / over(2),
        optimizer_bytes=parameters * (precision.main_weight + precision.moments) / over(1),
    )


def states_of_pieces(
    pieces: Iterable[Piece],
    precision: Precision,
    split: Split,
    *,
    sharding: Sharding,
    data_parallel: int,
) -> States:
    """What the pieces of one pipeline rank cost it.

    data_parallel: replicas of the model. Context-parallel ranks hold the same parameters too, and
    experts are copied over what their own groups leave: data_parallel · cp · t / (ep · etp) ranks.
    A tied head counts only where the embedding is not among the pieces. Raises ConfigError.
    """
    chosen = list(pieces)
    has_embedding = any(piece.kind == "embedding" for piece in chosen)
    dense = _count(chosen, "dense", tied=not has_embedding)
    expert = _count(chosen, "expert", tied=False)
    total = states(
        dense, precision, sharding=sharding, copies=max(1, data_parallel * split.context)
    )
    if not expert:
        return total
    copies = _expert_copies(split, data_parallel)
    return total + states(expert, precision, sharding=sharding, copies=copies)


def _count(pieces: list[Piece], group: str, *, tied: bool) -> float:
    def counts(weights: Weights) -> bool:
        return weights.group == group and (tied or not weights.tied)

    return sum(w.count for piece in pieces for w in piece.weights if counts(w))


def _expert_copies(split: Split, data_parallel: int) -> int:
    ranks = data_parallel * split.context * split.tensor
    groups = split.expert * split.width_of_experts
    if ranks % groups:
        raise ConfigError(
            f"--expert-model-parallel-size {split.expert} x --expert-tensor-parallel-size "
            f"{split.width_of_experts} does not divide the {ranks} ranks of data, context and "
            "tensor parallelism: use sizes whose product does"
        )
    return ranks // groups
