"""Tiny random models of many families, for the tests of cutting."""

from __future__ import annotations

from typing import Any

import torch

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 3, "pad_token_id": 0}

# model type -> what it needs beyond SMALL; windows are shorter than the tests' sequences
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, **WINDOW},
    "qwen3": {},
    "mistral": WINDOW,
    "gemma": {},
    "gemma2": WINDOW,
    "gemma3_text": {
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
    "gpt2": {},
    "gpt_neox": {},
    "phi": {},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 48},
    "bloom": {},
    "olmo": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "head_dim": 4,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def make_config(family: str, *, dropout: bool = False, **changes: Any) -> Any:
    """A tiny configuration of a family, without dropout unless that is asked for."""
    from transformers import AutoConfig

    options = {**SMALL, **FAMILIES[family], **changes}
    for name in ("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"):
        options[name] = 0.1 if dropout else 0.0
    options["dropout"] = 0.1 if dropout else 0.0
    return AutoConfig.for_model(family, **options)


def make_model(family: str, **changes: Any) -> Any:
    """A tiny random model of a family, from a fixed seed, weights large enough to matter."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(make_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
        weights = dict(model.named_parameters(remove_duplicate=False))
        for name, buffer in model.state_dict(keep_vars=True).items():
            if name not in weights:  # a buffer that files hold
                buffer.normal_()
    return model
