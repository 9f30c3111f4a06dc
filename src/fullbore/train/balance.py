"""How many layers each stage gets: by what they cost, with embedding and head counted.

A head can weigh as much as eight layers (SmolLM2-135M's does), so layers alone say little. Costs
are forward FLOPs a token: from the configuration where `fullbore.cost.model` knows the family, else
from the matrices that the model has, which leaves the attention's own products out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.layer import pieces
from fullbore.cost.model.split import Precision, Recompute, Split
from fullbore.cost.partition import partition
from fullbore.errors import ModelError
from fullbore.train.anatomy import Anatomy

__all__ = ["PieceCosts", "balance", "piece_costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCosts:
    """Forward FLOPs of one token: of what stands before the layers, of each layer, of the head.

    counts: what the figures count, for printing beside them.
    """

    embedding: float
    layers: tuple[float, ...]
    head: float
    counts: str

    @property
    def step_flops_per_token(self) -> float:
        """Model FLOPs of a training step, a token: three forwards."""
        return 3 * (self.embedding + sum(self.layers) + self.head)


def piece_costs(model: nn.Module, anatomy: Anatomy, *, seq_length: int) -> PieceCosts:
    """What the pieces of a model cost; model: the whole of it on the meta device, untouched."""
    config: Any = model.config
    try:
        costs = _from_shape(config.to_dict(), seq_length)
    except ModelError:
        return _from_matrices(model, anatomy)
    return PieceCosts(
        embedding=costs[0],
        layers=costs[1:-1],
        head=costs[-1],
        counts="matrices and the causal half of attention",
    )


def balance(costs: PieceCosts, *, stages: int) -> tuple[int, ...]:
    """Layers of each stage such that the most expensive stage is as cheap as possible.

    The embedding goes with the first layer; the last stage may hold nothing but the head. There
    must be no more stages than layers and head.
    """
    first, *others = costs.layers
    sizes = partition([costs.embedding + first, *others, costs.head], stages)
    return (*sizes[:-1], sizes[-1] - 1)


def _from_shape(config: Mapping[str, object], seq_length: int) -> tuple[float, ...]:
    """Forward FLOPs a token of embedding, layers and head; ModelError where there is no price."""
    priced = pieces(
        shape_of(config),
        Split(),
        sequence=seq_length,
        microbatch=1,
        recompute=Recompute(),
        precision=Precision.named("bf16"),
        causal=True,
    )
    return tuple(piece.forward_flops / seq_length for piece in priced)


def _from_matrices(model: nn.Module, anatomy: Anatomy) -> PieceCosts:
    """Two FLOPs for each element of a matrix; of a mixture's experts, those that a token meets."""
    config: Any = model.config
    text = config.get_text_config()
    share = _share_of_experts(text)
    layers = []
    for layer in range(anatomy.layers):
        block = model.get_submodule(f"{anatomy.blocks}.{layer}")
        layers.append(
            sum(
                2.0 * weight.numel() * (share if "experts" in name.split(".") else 1.0)
                for name, weight in block.named_parameters()
                if weight.dim() > 1
            )
        )
    ends = (model.get_submodule(name) for name in anatomy.after)
    head = sum(2.0 * w.numel() for end in ends for w in end.parameters() if w.dim() > 1)
    return PieceCosts(embedding=0.0, layers=tuple(layers), head=head, counts="matrices only")


def _share_of_experts(config: Any) -> float:
    """The share of its experts that a token is sent to; 1 where the configuration tells none."""
    chosen = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if isinstance(experts, int) and isinstance(chosen, int) and 0 < chosen <= experts:
            return chosen / experts
    return 1.0
