"""A Hugging Face configuration read as a `ModelShape`.

What is not priced exactly (encoders, cross-attention, linear attention, unknown families) is
refused by the name of its key, not priced wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping

from fullbore.cost.model.config import Config
from fullbore.cost.model.families import family_of
from fullbore.cost.model.family import Family
from fullbore.cost.model.shape import (
    MOST_LAYERS,
    Activation,
    Attention,
    Experts,
    Head,
    LatentAttention,
    LayerShape,
    Mlp,
    ModelShape,
)
from fullbore.errors import ModelError

__all__ = ["shape_of"]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_spelled",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
}
_REFUSED = {
    "add_cross_attention": "cross-attention",
    "is_encoder_decoder": "an encoder",
    "index_topk": "sparse attention",
    "text_config": "a model of several parts (give the text part as a configuration by itself)",
}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def shape_of(data: Mapping[str, object]) -> ModelShape:
    """The shape that a `config.json`, as a mapping, describes.

    Raises ModelError naming the key or the feature that has no price.
    """
    for key, what in _REFUSED.items():
        if data.get(key):
            raise ModelError(f"cannot price {what} ({key}) yet")
    family = family_of(data)
    config = Config(data=data, names=family.names, older=family.older)
    _check_needs(config, family)
    return _shape(config, family)


def _check_needs(config: Config, family: Family) -> None:
    name = config.data["model_type"]
    for key in family.needs:
        if config.called(key) not in config.data:
            raise ModelError(
                f"{config.called(key)} is missing in the configuration of this {name} model"
            )
    if family.mixture is None:
        for key in _EXPERT_COUNTS:
            if config.data.get(key):
                raise ModelError(f"{key} says a mixture of experts, which {name} models have not")
    if not family.latent and config.data.get("kv_lora_rank"):
        raise ModelError(f"kv_lora_rank says latent attention, which {name} models have not")


def _shape(config: Config, family: Family) -> ModelShape:
    layers = config.number("num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ModelError(
            f"{config.called('num_hidden_layers')} is {layers}: at most {MOST_LAYERS} can be priced"
        )
    _check_kinds(config, layers)
    positions, unused = 0, family.unused_positions
    if family.positions is not None:
        positions = config.number("max_position_embeddings", family.positions) + unused
    return ModelShape(
        name=str(config.data["model_type"]),
        hidden=config.number("hidden_size"),
        layers=tuple(_layer(config, family, index) for index in range(layers)),
        vocab=config.number("vocab_size"),
        head=Head(
            tied=config.flag("tie_word_embeddings", family.tied),
            bias=_bias(config, family, family.head_bias),
            softcap=_is_capped(config, family, "final_logit_softcapping"),
        ),
        positions=positions,
        unused_positions=unused,
        norm=family.norm,
        embedding_norm=family.embedding_norm,
        final_norm=not config.flag("_remove_final_layer_norm", default=False),
        hidden_dropout=config.share("hidden_dropout", family.dropout),
        attention_dropout=config.share("attention_dropout", family.dropout),
        mtp_layers=max(
            config.number(key, 0, least=0) for key in ("num_nextn_predict_layers", "num_mtp_layers")
        ),
        unfused=family.unfused,
    )


def _check_kinds(config: Config, layers: int) -> None:
    kinds = config.items("layer_types")
    if kinds is not None and len(kinds) != layers:
        raise ModelError(
            f"layer_types names {len(kinds)} layers: {config.called('num_hidden_layers')} is "
            f"{layers}"
        )


def _layer(config: Config, family: Family, index: int) -> LayerShape:
    window = _window(config, family, index)
    return LayerShape(
        attention=_latent(config, family, window)
        if family.latent
        else _attention(config, family, window),
        mlp=_experts(config, family)
        if _is_mixture(config, family, index)
        else _mlp(config, family),
        norms_before=family.norms_before,
        norms_after=family.norms_after,
        parallel=family.parallel,
    )


def _attention(config: Config, family: Family, window: int | None) -> Attention:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    groups = config.number("num_key_value_heads", heads) if family.grouped else heads
    if not family.grouped and config.flag("multi_query", default=family.multi_query):
        groups = 1
    if hidden % heads and not config.has("head_dim"):
        raise ModelError(
            f"{config.called('num_attention_heads')} is {heads}: it must divide "
            f"{config.called('hidden_size')}, {hidden}, where head_dim is not given"
        )
    width = config.number("head_dim", hidden // heads)
    if heads % groups:
        raise ModelError(
            f"{config.called('num_key_value_heads')} is {groups}: it must divide the {heads} heads"
        )
    return Attention(
        heads=heads,
        groups=groups,
        width=width,
        qkv_bias=_bias(config, family, family.qkv_bias),
        out_bias=_bias(config, family, family.out_bias),
        qk_norm=family.qk_norm,
        qk_norm_kind=family.qk_norm_kind,
        window=window,
        sinks=family.sinks,
        rotary=_rotary(config, family, width),
        softcap=_is_capped(config, family, "attn_logit_softcapping"),
    )


def _rotary(config: Config, family: Family, width: int) -> float:
    """The share of a head that is rotated, wherever the configuration says it."""
    if not family.rotary:
        return 0.0
    if config.has("rotary_dim"):
        return min(1.0, config.number("rotary_dim") / width)
    nested = config.data.get("rope_parameters")
    inside = nested if isinstance(nested, Mapping) else {}
    if inside.get("partial_rotary_factor") is not None:
        return Config(data=inside, names={}).share("partial_rotary_factor", family.rotary)
    return config.share("partial_rotary_factor", family.rotary)


def _latent(config: Config, family: Family, window: int | None) -> LatentAttention:
    return LatentAttention(
        heads=config.number("num_attention_heads"),
        query_rank=config.number("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_rank=config.number("kv_lora_rank"),
        plain_width=config.number("qk_nope_head_dim"),
        rotary_width=config.number("qk_rope_head_dim"),
        value_width=config.number("v_head_dim"),
        bias=_bias(config, family, family.qkv_bias),
        window=window,
    )


def _mlp(config: Config, family: Family) -> Mlp:
    usual = 4 * config.number("hidden_size") if family.four_times else None
    return Mlp(
        width=config.number("intermediate_size", usual),
        gated=family.gated,
        bias=_bias(config, family, family.mlp_bias),
        activation=_activation(config, family),
    )


def _experts(config: Config, family: Family) -> Experts:
    mixture = family.mixture
    assert mixture is not None
    count = config.number(_counted_by(config))
    chosen = config.number("num_experts_per_tok")
    if chosen > count:
        raise ModelError(f"num_experts_per_tok is {chosen}: there are {count} experts")
    width = config.number(mixture.width)
    activation: Activation = (
        "clamped_silu" if config.data["model_type"] == "gpt_oss" else _activation(config, family)
    )
    return Experts(
        count=count,
        chosen=chosen,
        width=width,
        gated=family.gated,
        bias=mixture.bias,
        activation=activation,
        shared=_shared(config, family, width),
        shared_gate=mixture.shared_gate,
        router_bias=mixture.router_bias,
        score_bias=mixture.score_bias,
    )


def _shared(config: Config, family: Family, width: int) -> Mlp | None:
    mixture = family.mixture
    assert mixture is not None
    size = config.number(mixture.shared, 0, least=0) if mixture.shared else 0
    if not size:
        return None
    return Mlp(
        width=size * width if mixture.counted else size,
        gated=family.gated,
        activation=_activation(config, family),
    )


def _counted_by(config: Config) -> str:
    """The key that says how many experts there are. Raises ModelError where there is none."""
    for key in _EXPERT_COUNTS:
        if config.has(key):
            return key
    raise ModelError(
        f"{_EXPERT_COUNTS[0]} is missing in the model's configuration, and so are its other names, "
        f"{' and '.join(_EXPERT_COUNTS[1:])}"
    )


def _is_mixture(config: Config, family: Family, index: int) -> bool:
    if family.mixture is None:
        return False
    if index < config.number("first_k_dense_replace", 0, least=0):
        return False
    if index in (config.items("mlp_only_layers") or ()):
        return False
    if (index + 1) % config.number("decoder_sparse_step", 1):
        return False
    return index % config.number("moe_layer_freq", 1) == 0


def _activation(config: Config, family: Family) -> Activation:
    name = config.word("hidden_act", family.activation)
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"cannot price the activation {name!r} ({config.called('hidden_act')}); known are "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _bias(config: Config, family: Family, told: bool | str) -> bool:  # noqa: FBT001
    return told if isinstance(told, bool) else config.flag(told, family.bias_default)


def _is_capped(config: Config, family: Family, name: str) -> bool:
    return family.softcap and (config.has(name) or name not in config.data)


def _window(config: Config, family: Family, index: int) -> int | None:
    """How far back a layer looks, where it is limited."""
    kinds = config.items("layer_types")
    if kinds is not None:
        kind = kinds[index]
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"cannot price layers of type {kind!r} (layer_types) yet")
        limited = kind == "sliding_attention"
    else:
        limited = _is_limited(config, family, index)
    if not limited or not config.has("sliding_window"):
        return None
    if family.asks_window and not config.flag("use_sliding_window", default=False):
        return None  # Qwen names a window even if it has none
    return config.number("sliding_window")


def _is_limited(config: Config, family: Family, index: int) -> bool:
    match family.windows:
        case "all":
            return True
        case "even":
            return index % 2 == 0
        case "late":
            return index >= config.number("max_window_layers", 28, least=0)
        case "early_even":
            return index % 2 == 0 and index < config.number("max_window_layers", 28, least=0)
        case "all_but_every_4th":
            return (index + 1) % 4 != 0
        case "pattern_6":
            return (index + 1) % config.number("sliding_window_pattern", 6) != 0
        case _:
            return False
