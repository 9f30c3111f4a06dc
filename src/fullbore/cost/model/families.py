"""The families that have a price, each with what its name implies.

Read from the modules of transformers, and held against them in tests: parameters exactly, for
every family here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fullbore.cost.model.config import Config
from fullbore.cost.model.family import Family, Mixture
from fullbore.cost.model.shape import Unfused
from fullbore.errors import ModelError

__all__ = ["family_of", "known"]


def known() -> tuple[str, ...]:
    """The families that have a price, by `model_type`."""
    return tuple(sorted(_FAMILIES))


def family_of(data: Mapping[str, object]) -> Family:
    """The family that a configuration names. Raises ModelError where it has no price."""
    name = data.get("model_type")
    if name is None:
        raise ModelError(
            f"model_type is missing in the model's configuration: it says which family it is of, "
            f"{', '.join(known())}"
        )
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ModelError(
            f"cannot price a model of type {name!r} (model_type); known are {', '.join(known())}"
        )
    found = _FAMILIES[name]
    return found if isinstance(found, Family) else found(Config(data=data, names={}))


_KV, _KV_AND_WIDTH = ("num_key_value_heads",), ("num_key_value_heads", "head_dim")
_WINDOW, _OLDER = ("sliding_window",), {"hidden_size": "n_embed"}
_LLAMA = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_OLMO2 = replace(
    _LLAMA,
    unfused=Unfused(norm_32=True),
    mlp_bias=False,
    norms_before=0,
    norms_after=2,
    qk_norm="all",
)
_GEMMA = replace(
    _LLAMA,
    mlp_bias=False,
    tied=True,
    needs=_KV_AND_WIDTH,
    activation="gelu_pytorch_tanh",
    names={"hidden_act": "hidden_activation"},
    unfused=Unfused(norm_32=True),
)
_GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
    "hidden_dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "max_position_embeddings": "n_positions",
}
_GPT2 = Family(
    names=_GPT_NAMES,
    four_times=True,
    gated=False,
    activation="gelu_new",
    grouped=False,
    norm="layer",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tied=True,
    positions=1024,
    rotary=0.0,
    dropout=0.1,
    unfused=Unfused(softmax_32=False),
)
_DEEPSEEK = Family(
    latent=True,
    qkv_bias="attention_bias",
    needs=("kv_lora_rank", "q_lora_rank", "n_shared_experts"),
    unfused=Unfused(router_32=True),
    mixture=Mixture(shared="n_shared_experts", counted=True),
)


def _phi(config: Config) -> Family:
    normed = config.flag("qk_layernorm", default=False)
    return Family(
        gated=False,
        activation="gelu_new",
        norm="layer",
        norms_before=1,
        parallel=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        rotary=0.5,
        qk_norm="head" if normed else "none",
        qk_norm_kind="layer",
        names={"hidden_dropout": "resid_pdrop"},
    )


def _gpt_neox(config: Config) -> Family:
    return Family(
        gated=False,
        activation="gelu",
        norm="layer",
        grouped=False,
        parallel=config.flag("use_parallel_residual", default=True),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias=True,
        bias_default=True,
        rotary=0.25,
        names={"partial_rotary_factor": "rotary_pct"},
        unfused=Unfused(joint_qkv=True),
    )


def _falcon(config: Config) -> Family:
    new = config.flag("new_decoder_architecture", default=False)
    parallel = new or config.flag("parallel_attn", default=True)
    norms = config.number("num_ln_in_parallel_attn", 2 if new else 1)
    return Family(
        names={
            "num_key_value_heads": "num_kv_heads",
            "intermediate_size": "ffn_hidden_size",
            "hidden_act": "activation",
        },
        older=_OLDER,
        four_times=True,
        gated=False,
        activation="gelu",
        norm="layer",
        norms_before=norms if config.flag("parallel_attn", default=True) else 2,
        parallel=parallel,
        grouped=new,
        multi_query=True,
        qkv_bias="bias",
        out_bias="bias",
        mlp_bias="bias",
        tied=True,
        rotary=0.0 if config.flag("alibi", default=False) else 1.0,
        unfused=Unfused(softmax_32=False),
    )


def _cohere(config: Config) -> Family:
    normed = config.flag("use_qk_norm", default=False)
    return replace(
        _LLAMA,
        mlp_bias=False,
        norm="centered",
        norms_before=1,
        parallel=True,
        qk_norm="each_head" if normed else "none",
        qk_norm_kind="centered",
        tied=True,
    )


def _stablelm(config: Config) -> Family:
    parallel = config.flag("use_parallel_residual", default=False)
    normed = config.flag("qk_layernorm", default=False)
    return Family(
        needs=_KV,
        norm="layer",
        norms_before=1 if parallel else 2,
        parallel=parallel,
        qkv_bias="use_qkv_bias",
        qk_norm="each_head" if normed else "none",
        qk_norm_kind="centered",
        rotary=0.25,
    )


def _opt(config: Config) -> Family:
    if config.number("word_embed_proj_dim", config.number("hidden_size")) != config.number(
        "hidden_size"
    ):
        raise ModelError("cannot price an embedding of another width (word_embed_proj_dim)")
    if not config.flag("do_layer_norm_before", default=True):
        raise ModelError("cannot price norms behind the layers (do_layer_norm_before = false)")
    bias = config.flag("enable_bias", default=True)
    return Family(
        names={
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "hidden_dropout": "dropout",
        },
        needs=("attention_dropout",),
        gated=False,
        activation="relu",
        grouped=False,
        norm="layer" if config.flag("layer_norm_elementwise_affine", default=True) else "bare",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=True,
        positions=2048,
        unused_positions=2,
        rotary=0.0,
        dropout=0.1,
    )


def _glm4_moe(config: Config) -> Family:
    normed = config.flag("use_qk_norm", default=False)
    return Family(
        needs=(*_KV, "n_shared_experts", "first_k_dense_replace"),
        qkv_bias="attention_bias",
        qk_norm="head" if normed else "none",
        mixture=Mixture(shared="n_shared_experts", counted=True, score_bias=True),
        rotary=0.5,
        unfused=Unfused(router_32=True),
    )


def _olmoe(config: Config) -> Family:
    return replace(
        _LLAMA, mlp_bias=False, qk_norm="all", mixture=Mixture(width="intermediate_size")
    )


def _granitemoe(config: Config) -> Family:
    return replace(_LLAMA, mlp_bias=False, mixture=Mixture(width="intermediate_size"))


_FAMILIES: dict[str, Family | Callable[[Config], Family]] = {
    "bloom": Family(
        names={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
        },
        older=_OLDER,
        four_times=True,
        gated=False,
        activation="gelu",
        grouped=False,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
        embedding_norm=True,
        rotary=0.0,
    ),
    "cohere": _cohere,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": replace(
        _DEEPSEEK,
        needs=(*_DEEPSEEK.needs, "first_k_dense_replace"),
        mixture=Mixture(shared="n_shared_experts", counted=True, score_bias=True),
    ),
    "falcon": _falcon,
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        needs=(*_KV_AND_WIDTH, *_WINDOW),
        norms_after=2,
        windows="even",
        softcap=True,
    ),
    "gemma3_text": replace(
        _GEMMA,
        needs=(*_KV_AND_WIDTH, *_WINDOW),
        norms_after=2,
        windows="pattern_6",
        qk_norm="head",
    ),
    "glm4_moe": _glm4_moe,
    "gpt2": _GPT2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": Family(
        needs=(*_KV_AND_WIDTH, *_WINDOW),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        bias_default=True,
        sinks=True,
        unfused=Unfused(softmax_32=False, norm_32=True),
        windows="even",
        mixture=Mixture(width="intermediate_size", bias=True, router_bias=True),
    ),
    "gptj": Family(
        names=_GPT_NAMES,
        needs=("rotary_dim",),
        four_times=True,
        gated=False,
        activation="gelu_new",
        grouped=False,
        norm="layer",
        norms_before=1,
        parallel=True,
        mlp_bias=True,
        head_bias=True,
        unfused=Unfused(scores_32=True, assembled=False),
    ),
    "granite": _LLAMA,
    "granitemoe": _granitemoe,
    "llama": _LLAMA,
    "mistral": Family(needs=(*_KV, *_WINDOW), windows="all"),
    "mixtral": Family(needs=_KV, windows="all", mixture=Mixture(width="intermediate_size")),
    "nemotron": replace(_LLAMA, gated=False, activation="relu2", norm="layer", rotary=0.5),
    "olmo": replace(_LLAMA, mlp_bias=False, norm="bare"),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, needs=_WINDOW, windows="all_but_every_4th"),
    "olmoe": _olmoe,
    "opt": _opt,
    "phi": _phi,
    "phi3": Family(
        windows="all",
        names={"hidden_dropout": "resid_pdrop"},
        unfused=Unfused(joint_qkv=True, assembled=True),
    ),
    "qwen2": Family(qkv_bias=True, needs=_KV, windows="late", asks_window=True),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        bias_default=True,
        needs=(*_KV, "shared_expert_intermediate_size"),
        windows="early_even",
        asks_window=True,
        mixture=Mixture(shared="shared_expert_intermediate_size", shared_gate=True),
    ),
    "qwen3": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        needs=_KV_AND_WIDTH,
        windows="late",
        asks_window=True,
    ),
    "qwen3_moe": Family(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="head",
        needs=_KV,
        windows="all",
        asks_window=True,
        mixture=Mixture(),
    ),
    "seed_oss": Family(
        needs=(*_KV_AND_WIDTH, "attention_bias"),
        dropout=0.1,
        qkv_bias="attention_bias",
        out_bias="attention_out_bias",
        mlp_bias="mlp_bias",
        names={"hidden_dropout": "residual_dropout"},
    ),
    "smollm3": replace(_LLAMA, tied=True, needs=_KV, asks_window=True),
    "stablelm": _stablelm,
    "starcoder2": Family(
        needs=_KV,
        gated=False,
        activation="gelu_pytorch_tanh",
        norm="layer",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        bias_default=True,
        tied=True,
        windows="all",
        names={"hidden_dropout": "residual_dropout"},
    ),
}
