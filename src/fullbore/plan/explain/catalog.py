"""The flags of Megatron-LM that a prediction or a rule looks at, and what each one takes.

Names are those of `argparse`, with underscores. Source: Megatron-LM,
`megatron/training/arguments.py`, and Megatron Core, `transformer/transformer_config.py`.
"""

from __future__ import annotations

from fullbore.cost.hardware.capture import IMPLEMENTATIONS

__all__ = [
    "CHOICES",
    "GONE",
    "LAUNCHER",
    "LISTS",
    "LOOKED_AT",
    "NUMBERS",
    "OPTIONAL",
    "SWITCHES",
    "flag",
]

# Whole numbers, with the least that they may be.
NUMBERS: dict[str, int] = {
    "num_layers": 1,
    "hidden_size": 1,
    "num_attention_heads": 1,
    "ffn_hidden_size": 1,
    "kv_channels": 1,
    "num_query_groups": 1,
    "max_position_embeddings": 1,
    "seq_length": 1,
    "vocab_size": 1,
    "padded_vocab_size": 1,
    "make_vocab_size_divisible_by": 1,
    "num_experts": 0,
    "moe_ffn_hidden_size": 1,
    "moe_router_topk": 1,
    "moe_shared_expert_intermediate_size": 1,
    "mtp_num_layers": 0,
    "q_lora_rank": 1,
    "kv_lora_rank": 1,
    "qk_head_dim": 1,
    "qk_pos_emb_head_dim": 1,
    "v_head_dim": 1,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": 1,
    "num_virtual_stages_per_pipeline_rank": 1,
    "microbatch_group_size_per_virtual_pipeline_stage": 1,
    "decoder_first_pipeline_num_layers": 1,
    "decoder_last_pipeline_num_layers": 1,
    "recompute_num_layers": 1,
    "cpu_offloading_num_layers": 0,
}

# Of the numbers above those that may be left out, and then have a meaning of their own.
OPTIONAL = frozenset(
    {
        "ffn_hidden_size",
        "kv_channels",
        "global_batch_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "microbatch_group_size_per_virtual_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "recompute_num_layers",
        "cpu_offloading_num_layers",
        "mtp_num_layers",
    }
)

SWITCHES = frozenset(
    {
        "bf16",
        "fp16",
        "fp8_param_gather",
        "swiglu",
        "squared_relu",
        "disable_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "group_query_attention",
        "multi_latent_attention",
        "untie_embeddings_and_output_weights",
        "use_rotary_position_embeddings",
        "moe_shared_expert_gate",
        "moe_router_enable_expert_bias",
        "moe_grouped_gemm",
        "moe_pad_expert_input_to_capacity",
        "sequence_parallel",
        "use_distributed_optimizer",
        "use_precision_aware_optimizer",
        "optimizer_cpu_offload",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "no_overlap_p2p_communication",
        "overlap_p2p_communication",
        "overlap_p2p_communication_warmup_flush",
        "tp_comm_overlap",
        "enable_cuda_graph",
        "external_cuda_graph",
        "overlap_moe_expert_parallel_comm",
        "grad_reduce_in_bf16",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "recompute_activations",
        "distribute_saved_activations",
        "use_flash_attn",
        "use_torch_fsdp2",
        "use_megatron_fsdp",
        "deterministic_mode",
        "cross_entropy_loss_fusion",
        "fp16_lm_cross_entropy",
        "fp32_residual_connection",
    }
)

_MOMENTS = ("fp32", "bf16", "fp16", "fp8")

CHOICES: dict[str, tuple[str, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
    "transformer_impl": ("transformer_engine", "local", "inference_optimized"),
    "recompute_granularity": ("selective", "full"),
    "recompute_method": ("uniform", "block"),
    "fp8_format": ("hybrid", "e4m3"),
    "fp8_recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "cuda_graph_impl": IMPLEMENTATIONS,
    "fp4_format": ("e2m1",),
    "moe_token_dispatcher_type": ("alltoall", "allgather", "flex"),
    "data_parallel_sharding_strategy": (
        "no_shard",
        "optim",
        "optim_grads",
        "optim_grads_params",
    ),
    "optimizer": ("adam", "sgd", "muon", "dist_muon"),
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
    "exp_avg_dtype": _MOMENTS,
    "exp_avg_sq_dtype": _MOMENTS,
}

LISTS = frozenset(
    {
        "pipeline_model_parallel_layout",
        "recompute_modules",
        "cuda_graph_modules",
        "cuda_graph_scope",
        "moe_layer_freq",
        "window_size",
        "window_attn_skip_freq",
        "rotary_percent",
        "hidden_dropout",
        "attention_dropout",
        "tokenizer_type",
        "vocab_file",
        "merge_file",
        "rampup_batch_size",
        "moe_expert_capacity_factor",
        "train_iters",
        "train_samples",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_warmup_fraction",
        "lr_warmup_iters",
        "lr_warmup_samples",
    }
)

LOOKED_AT = frozenset({*NUMBERS, *SWITCHES, *CHOICES, *LISTS})

# What Megatron-LM had once: what to write now.
GONE: dict[str, str] = {
    "batch_size": "micro_batch_size",
    "model_parallel_size": "tensor_model_parallel_size",
    "warmup": "lr_warmup_fraction",
    "checkpoint_activations": "recompute_activations",
}

# Of torchrun and its relatives, which stand in the same script.
LAUNCHER = frozenset(
    {
        "nproc_per_node",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "max_restarts",
        "standalone",
        "log_dir",
        "redirects",
        "tee",
    }
)


def flag(name: str) -> str:
    """As it is typed: --seq-length."""
    return "--" + name.replace("_", "-")
