"""FLOPs and parameters of a decoder, derived from the matrices that its configuration names.

For MFU and for balancing stages. The product of an [m, k] and a [k, n] matrix counts 2mkn; norms,
biases, activations and softmax count nothing, as is usual in published figures. A training step
counts three forwards. What is not priced yet (mixtures of experts, latent or linear attention,
windows shorter than the sequence, unknown families) is refused by name, not priced wrongly.

Source: the formula of Narayanan et al., arXiv:2104.04473, section 5.1, taken matrix by matrix so
that gated MLPs, grouped-query attention and heads of another width come out right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fullbore.errors import ModelError

__all__ = ["Decoder", "head_flops", "layer_flops", "piece_flops", "step_flops"]

_TRAINING = 3  # forwards that a step is worth: itself, the input gradient, the weight gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The shape of a decoder-only transformer whose layers are all alike.

    h hidden, a heads, g kv_heads, d head_dim, f ffn. gated: three MLP matrices (h x f), not two.
    window: the furthest that a token looks back in some layer, None for all the way. tied: the
    head is the embedding's matrix. The counts are parameters: of one layer, of the embedding
    (learned positions included), of the final norm and of the head (its matrix too where tied).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    window: int | None
    layer_parameters: int
    embedding_parameters: int
    final_norm_parameters: int
    head_parameters: int

    @staticmethod
    def from_config(config: Mapping[str, object]) -> Decoder:
        """Read a Hugging Face `config.json`, as a mapping.

        Raises ModelError naming the key or the feature that has no price.
        """
        return _read(config)

    @property
    def parameters(self) -> int:
        """All parameters of the model, a tied head counted once."""
        shared = self.vocab * self.hidden if self.tied else 0
        ends = self.embedding_parameters + self.final_norm_parameters + self.head_parameters
        return self.layers * self.layer_parameters + ends - shared


def layer_flops(decoder: Decoder, *, sequence: int, causal: bool) -> float:
    """Forward FLOPs of one layer for one token: 2hd(a+2g) + 2adh + 2nhf + attention.

    Attention is 4·s·a·d, or half of it where `causal` counts only what the mask lets through.
    Published figures differ in this: say which one you print. Raises ModelError where a layer
    looks back less far than the sequence.
    """
    if decoder.window is not None and decoder.window < sequence:
        raise ModelError(
            f"cannot price a sliding_window of {decoder.window} under a sequence of {sequence}: "
            f"use sequences of at most {decoder.window}"
        )
    width = decoder.head_dim
    projections = 2 * decoder.hidden * width * (decoder.heads + 2 * decoder.kv_heads)
    projections += 2 * decoder.heads * width * decoder.hidden
    mlp = 2 * _mlp_matrices(gated=decoder.gated) * decoder.hidden * decoder.ffn
    attention = (2 if causal else 4) * sequence * decoder.heads * width
    return float(projections + mlp + attention)


def head_flops(decoder: Decoder) -> float:
    """Forward FLOPs of the logits of one token: 2hV."""
    return 2.0 * decoder.hidden * decoder.vocab


def piece_flops(decoder: Decoder, *, sequence: int, causal: bool) -> tuple[float, ...]:
    """Forward FLOPs a token of what a pipeline is cut from, in order: embedding, layers, head.

    Feed it to `partition`. The embedding is a look-up and costs nothing.
    """
    layer = layer_flops(decoder, sequence=sequence, causal=causal)
    return (0.0, *[layer] * decoder.layers, head_flops(decoder))


def step_flops(decoder: Decoder, *, sequence: int, sequences: int, causal: bool) -> float:
    """Model FLOPs of one training step over `sequences` sequences: three forwards.

    Recomputation is no model FLOP: divide by time and peak for MFU, not HFU.
    """
    forward = sum(piece_flops(decoder, sequence=sequence, causal=causal))
    return _TRAINING * forward * sequence * sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What the name of a family implies and its configuration does not say.

    norm: vectors a norm learns (RMSNorm 1, LayerNorm 2). norms: a layer. grouped: whether
    `num_key_value_heads` means anything. needs: keys whose default is not the usual one. A bias
    of None is up to the configuration's `attention_bias` or `mlp_bias`.
    """

    gated: bool = True
    grouped: bool = True
    needs: tuple[str, ...] = ()
    norm: int = 1
    norms: int = 2
    qk_norm: bool = False
    qkv_bias: bool | None = False
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    head_bias: bool = False
    tied: bool = False


_KV, _KV_AND_WIDTH = ("num_key_value_heads",), ("num_key_value_heads", "head_dim")
_FAMILIES = {
    "llama": _Family(qkv_bias=None, out_bias=None, mlp_bias=None),
    "smollm3": _Family(qkv_bias=None, out_bias=None, mlp_bias=None, tied=True, needs=_KV),
    "mistral": _Family(needs=_KV),
    "qwen2": _Family(qkv_bias=True, needs=_KV),
    "qwen3": _Family(qkv_bias=None, out_bias=None, qk_norm=True, needs=_KV_AND_WIDTH),
    "gemma": _Family(qkv_bias=None, out_bias=None, tied=True, needs=_KV_AND_WIDTH),
    "gemma2": _Family(qkv_bias=None, out_bias=None, tied=True, norms=4, needs=_KV_AND_WIDTH),
    "gemma3_text": _Family(
        qkv_bias=None, out_bias=None, tied=True, norms=4, qk_norm=True, needs=_KV_AND_WIDTH
    ),
    "phi3": _Family(),
    "phi": _Family(
        gated=False, norm=2, norms=1, qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True
    ),
    "gpt2": _Family(
        gated=False, norm=2, grouped=False, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True
    ),
    "gpt_neox": _Family(
        gated=False, norm=2, grouped=False, qkv_bias=None, out_bias=None, mlp_bias=True
    ),
}

_GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}

_UNPRICED = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "q_lora_rank": "latent attention",
    "add_cross_attention": "cross-attention",
    "is_encoder_decoder": "an encoder",
    "qk_layernorm": "norms of queries and keys",
}


def _read(config: Mapping[str, object]) -> Decoder:
    family = _family(config)
    hidden, heads = (_number(config, name) for name in ("hidden_size", "num_attention_heads"))
    kv_heads = _number(config, "num_key_value_heads", default=heads) if family.grouped else heads
    head_dim = _number(config, "head_dim", default=hidden // heads)
    ffn = _number(config, "intermediate_size", default=4 * hidden)
    vocab = _number(config, "vocab_size")
    qkv = head_dim * (heads + 2 * kv_heads)
    matrices = _mlp_matrices(gated=family.gated)
    layer = hidden * qkv + heads * head_dim * hidden + matrices * hidden * ffn
    layer += family.norms * family.norm * hidden + 2 * head_dim * family.qk_norm
    layer += qkv * _bias(config, "attention_bias", implied=family.qkv_bias)
    layer += hidden * _bias(config, "attention_bias", implied=family.out_bias)
    layer += ((matrices - 1) * ffn + hidden) * _bias(config, "mlp_bias", implied=family.mlp_bias)
    positions = _number(config, "n_positions") if config["model_type"] == "gpt2" else 0
    return Decoder(
        layers=_number(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        gated=family.gated,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        window=_window(config),
        layer_parameters=layer,
        embedding_parameters=(vocab + positions) * hidden,
        final_norm_parameters=family.norm * hidden,
        head_parameters=vocab * (hidden + family.head_bias),
    )


def _mlp_matrices(*, gated: bool) -> int:
    return 3 if gated else 2


def _family(config: Mapping[str, object]) -> _Family:
    for key, what in _UNPRICED.items():
        if config.get(key):
            raise ModelError(f"cannot price {what} ({key} = {config[key]}) yet")
    kinds = config.get("layer_types")
    for kind in kinds if isinstance(kinds, list | tuple) else ():
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"cannot price layers of type {kind!r} (layer_types) yet")
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ModelError(
            f"cannot price a model of type {name!r} (model_type); known are {', '.join(_FAMILIES)}"
        )
    family = _FAMILIES[name]
    for key in family.needs:
        if key not in config:
            raise ModelError(f"{key} is missing in the configuration of this {name} model")
    return family


def _number(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    """A positive whole number of the configuration, under GPT-2's name where that is used."""
    if config.get("model_type") == "gpt2":
        name = _GPT2_NAMES.get(name, name)
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "is missing" if value is None else f"is {value!r}"
        raise ModelError(f"{name} {found} in the model's configuration: it must be 1 or more")
    return value


def _bias(config: Mapping[str, object], name: str, *, implied: bool | None) -> int:
    if implied is not None:
        return int(implied)
    return int(bool(config.get(name, config["model_type"] == "gpt_neox")))


def _window(config: Mapping[str, object]) -> int | None:
    """How far back a layer looks, where it is limited (Qwen names a window even if it has none)."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return None
    return _number(config, "sliding_window")
