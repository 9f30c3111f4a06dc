"""Small configurations of every family that has a price, and real models made of them."""

from __future__ import annotations

from typing import Any

import torch

SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {
    "vocab_size": 512,
    "n_embd": 128,
    "n_layer": 3,
    "n_head": 8,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    **_MIXED,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}
_WIDTH = {"head_dim": 24}

# What each family needs beside SMALL, and what else of it is worth a look.
FAMILIES: dict[str, tuple[dict[str, Any], ...]] = {
    "bloom": ({"n_layer": 3, "n_head": 8},),
    "cohere": ({}, {"use_qk_norm": True, "attention_bias": True}),
    "deepseek_v2": (_LATENT, {**_LATENT, "q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3": (_LATENT, {**_LATENT, "q_lora_rank": None, "attention_bias": True}),
    "falcon": (
        {"ffn_hidden_size": 352},
        {"ffn_hidden_size": 352, "new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": False, "bias": True, "parallel_attn": False, "alibi": True},
    ),
    "gemma": (_WIDTH, {**_WIDTH, "attention_bias": True}),
    "gemma2": (_WIDTH,),
    "gemma3_text": (_WIDTH,),
    "glm4_moe": (
        {**_MIXED, "head_dim": 16},
        {**_MIXED, "head_dim": 24, "use_qk_norm": True, "attention_bias": True},
    ),
    "gpt2": (_GPT, {**_GPT, "n_inner": 352, "tie_word_embeddings": False}),
    "gpt_neox": ({}, {"attention_bias": False, "use_parallel_residual": False}),
    "gpt_oss": ({**_WIDTH, "num_local_experts": 8, "num_experts_per_tok": 2},),
    "gptj": ({**_GPT, "rotary_dim": 8},),
    "granite": ({}, {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": ({"num_local_experts": 8, "num_experts_per_tok": 2},),
    "llama": (
        {},
        {**_WIDTH, "attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
    ),
    "mistral": (_WIDTH,),
    "mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2},),
    "nemotron": ({"head_dim": 16}, {"head_dim": 16, "mlp_bias": True, "attention_bias": True}),
    "olmo": ({}, {"attention_bias": True}),
    "olmo2": ({},),
    "olmo3": ({},),
    "olmoe": ({"num_experts": 8, "num_experts_per_tok": 2},),
    "opt": (
        {"ffn_dim": 352, "word_embed_proj_dim": 128},
        {"ffn_dim": 352, "word_embed_proj_dim": 128, "enable_bias": False},
    ),
    "phi": ({}, {"qk_layernorm": True}),
    "phi3": ({},),
    "qwen2": ({},),
    "qwen2_moe": (
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
        },
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [2],
        },
    ),
    "qwen3": (_WIDTH, {**_WIDTH, "attention_bias": True}),
    "qwen3_moe": (
        {**_WIDTH, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "seed_oss": (
        {"head_dim": 16, "residual_dropout": 0.0, "attention_dropout": 0.0},
        {"head_dim": 16, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3": ({}, {"attention_bias": True, "mlp_bias": True}),
    "stablelm": ({}, {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "starcoder2": ({}, {"use_bias": False}),
}


def small_config(family: str, extra: dict[str, Any], **changes: Any) -> Any:
    """A small configuration of a family."""
    from transformers import AutoConfig

    options = {} if family in ("gpt2", "gptj") else dict(SMALL)
    return AutoConfig.for_model(family, **{**options, **extra, **changes})


def empty(config: Any) -> Any:
    """A model without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def real(config: Any, *, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """A model with random weights on the CPU, its experts run one after another, in training."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.train()
