"""The shape of a decoder: what a configuration says, with nothing yet derived from it.

Configurations of Hugging Face and flags of Megatron-LM both become a `ModelShape`; what a layer
costs follows from it alone. A shape holds whole layers one after another, so that dense layers
before a mixture of experts, or windows in every second layer, are no special case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "MOST_LAYERS",
    "Activation",
    "Attention",
    "Experts",
    "Head",
    "LatentAttention",
    "LayerShape",
    "Mlp",
    "ModelShape",
    "Norm",
    "Unfused",
]

# More than any model has, and few enough to be listed.
MOST_LAYERS = 10_000

# RMSNorm learns one vector, LayerNorm two or, without its bias, one; OLMo's learns none.
Norm = Literal["rms", "layer", "centered", "bare"]

# How an activation is written in an unfused implementation: as one operation, or GPT-2's tanh
# approximation of GELU spelled out in several.
Activation = Literal["silu", "gelu", "gelu_spelled", "relu", "relu2", "clamped_silu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head or grouped-query attention.

    heads: a of queries. groups: g of keys and values. width: d, of one head. qkv_bias, out_bias:
    whether those matrices have one. qk_norm: none; head, over each head's width; each_head, the
    same with weights of its own for every head; all, over all heads at once. qk_norm_kind: of that
    norm. window: how far back a token looks, None for all the way. sinks: one learned number a head
    beside the scores. rotary: the share of the width that is rotated (0 where positions are learned
    or there are none). softcap: whether tanh bounds the scores.
    """

    heads: int
    groups: int
    width: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "each_head", "all"] = "none"
    qk_norm_kind: Norm = "rms"
    window: int | None = None
    sinks: bool = False
    rotary: float = 1.0
    softcap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values of low rank.

    query_rank: of the queries' own compression, None where they have none. kv_rank: of the keys
    and values. plain_width, rotary_width: of a head's queries and keys, without and with rotation;
    the rotated part of the keys is shared by all heads. value_width: of a head's values. bias: of
    the down projections and the output. norms: whether the compressed vectors pass one.
    """

    heads: int
    query_rank: int | None
    kv_rank: int
    plain_width: int
    rotary_width: int
    value_width: int
    bias: bool = False
    norms: bool = True
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """An MLP of inner width f; gated: three matrices (h x f), not two."""

    width: int
    gated: bool = True
    bias: bool = False
    activation: Activation = "silu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: each token goes to `chosen` of `count` MLPs of width `width`.

    shared: the MLP that every token goes through too, None where there is none. shared_gate:
    whether a learned sigmoid weighs it. router_bias: whether the router's product has one.
    score_bias: a correction of the scores, one number an expert, that is stored but not trained by
    gradients (DeepSeek-V3), so it counts as no parameter. bias: of the experts' matrices.
    """

    count: int
    chosen: int
    width: int
    gated: bool = True
    bias: bool = False
    activation: Activation = "silu"
    shared: Mlp | None = None
    shared_gate: bool = False
    router_bias: bool = False
    score_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer: attention, then an MLP or experts.

    norms_before: norms in front of them, 2 (1 where both read the same norm's output). norms_after:
    norms behind them, before the residual sum. parallel: whether attention and MLP read the same
    input and are added at once.
    """

    attention: Attention | LatentAttention
    mlp: Mlp | Experts
    norms_before: int = 2
    norms_after: int = 0
    parallel: bool = False

    @property
    def kind(self) -> str:
        """dense, or experts."""
        return "experts" if isinstance(self.mlp, Experts) else "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The final norm, the logits and the loss.

    tied: the matrix is the embedding's. bias: of the logits. softcap: whether tanh bounds them.
    """

    tied: bool = False
    bias: bool = False
    softcap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfused:
    """What an implementation that fuses nothing keeps in its own way (Hugging Face's modules).

    softmax_32: whether the softmax is computed in 32 bits, and kept in both widths. norm_32:
    whether a norm casts back only after its weight. router_32: whether the router reads a copy in
    32 bits. scores_32: whether queries and keys are copied to 32 bits. joint_qkv: whether values
    are a view of one tensor with queries and keys, which stays with them. assembled: whether
    queries are put together head by head, and flash attention's output copied after it; None:
    where only a part of them is rotated.
    """

    softmax_32: bool = True
    norm_32: bool = False
    router_32: bool = False
    scores_32: bool = False
    joint_qkv: bool = False
    assembled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    name: family or origin, for printing. hidden: h. layers: in the model's order. vocab: V, as
    configured; vocab_multiple: what the embedding's rows are padded to a multiple of, times the
    tensor-parallel size (Megatron: 128; 1 for none). positions: learned positions, 0 for none;
    unused_positions: of them, rows in front that no token takes.
    norm: of the layers and the end; embedding_norm: whether one stands behind the embedding.
    hidden_dropout, attention_dropout: probabilities. mtp_layers: layers of a multi-token
    prediction; mtp_counted: whether they are part of what is counted, with the head, as Megatron-LM
    trains them (transformers leaves them out). unfused: how its modules keep tensors where nothing
    is fused.
    """

    name: str
    hidden: int
    layers: tuple[LayerShape, ...]
    vocab: int
    head: Head
    vocab_multiple: int = 1
    positions: int = 0
    unused_positions: int = 0
    norm: Norm = "rms"
    embedding_norm: bool = False
    final_norm: bool = True
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    mtp_layers: int = 0
    mtp_counted: bool = False
    unfused: Unfused = field(default_factory=Unfused)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence; None where no position is learned."""
        return self.positions - self.unused_positions if self.positions else None
