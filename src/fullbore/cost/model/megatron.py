"""Megatron-LM's flags read as a `ModelShape`, with what else they say about a rank's work.

Defaults are Megatron's own (`megatron/training/arguments.py`): LayerNorm, learned positions, a
GELU MLP of width 4h with biases, one matrix for embedding and head, dropout of 0.1. Flags that do
not change what a model costs are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fullbore.cost.model.pattern import layer_pattern
from fullbore.cost.model.script import Flags
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
    Norm,
)
from fullbore.cost.model.split import Dispatcher, Recompute
from fullbore.errors import ConfigError

__all__ = ["Given", "given_by_flags", "is_tokenizer_assumed", "shape_of_flags"]

# Vocabularies that follow from the tokenizer's type alone.
_ASSUMED = "GPT2BPETokenizer"
_TOKENIZERS = {_ASSUMED: 50257}

_REFUSED = {
    "encoder_num_layers": "an encoder",
    "decoder_num_layers": "a decoder beside an encoder",
    "hybrid_override_pattern": "state-space layers",
    "heterogeneous_layers_config_path": "layers described in a file of their own",
    "is_hybrid_model": "state-space layers",
    "experimental_attention_variant": "linear or sparse attention",
}

# The words that a flag takes, its default first.
_CHOICES = {
    "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position_embedding_type": ("learned_absolute", "rope", "mrope", "yarn", "relative", "none"),
    "recompute_method": ("uniform", "block"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
}

_LARGEST = 10**12  # what no number of a model comes near


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What flags say besides the model; None where they do not say it."""

    tensor: int | None = None
    sequence_parallel: bool | None = None
    context: int | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    pipeline: int | None = None
    sequence: int | None = None
    microbatch: int | None = None
    recompute: Recompute | None = None
    flash: bool | None = None
    precision: str | None = None
    sharding: str | None = None
    dispatcher: Dispatcher | None = None
    dropless: bool = True


@dataclass(frozen=True, slots=True)
class _Reader:
    flags: Mapping[str, tuple[str, ...]]

    def has(self, name: str) -> bool:
        return name in self.flags

    def word(self, name: str, default: str) -> str:
        words = self.flags.get(name, (default,))
        if len(words) != 1:
            raise ConfigError(f"{_flag(name)} needs one value, not {' '.join(words) or 'none'}")
        return words[0]

    def choice(self, name: str) -> str:
        """One of the words that Megatron takes; the first where the flag is not there."""
        word = self.word(name, _CHOICES[name][0])
        if word not in _CHOICES[name]:
            raise ConfigError(f"{_flag(name)} {word[:60]}: use {' or '.join(_CHOICES[name])}")
        return word

    def number(self, name: str, default: int | None = None) -> int:
        if default is None and name not in self.flags:
            raise ConfigError(f"{_flag(name)} is missing: the model's cost depends on it")
        text = self.word(name, str(default))
        try:
            value = int(text)
        except ValueError:
            raise ConfigError(f"{_flag(name)} {text[:60]}: it must be a whole number") from None
        if value < 1:
            raise ConfigError(f"{_flag(name)} {text[:60]}: it must be 1 or more")
        if value > _LARGEST:
            raise ConfigError(f"{_flag(name)} {text[:60]}: it must be 1 to {_LARGEST:.0e}")
        return value

    def optional(self, name: str) -> int | None:
        if name not in self.flags or self.flags[name] in (("None",), ("0",)):
            return None
        return self.number(name)

    def share(self, name: str, default: float) -> float:
        text = self.word(name, str(default))
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"{_flag(name)} {text}: it must be a number") from None
        if not 0 <= value < 1:
            raise ConfigError(f"{_flag(name)} {text}: it must be 0 or more and below 1")
        return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def shape_of_flags(flags: Flags) -> ModelShape:
    """The model that Megatron's flags describe. Raises ConfigError naming the flag."""
    read = _Reader(flags)
    _refuse_unpriced(read)
    hidden, layers = read.number("hidden_size"), read.number("num_layers")
    if layers > MOST_LAYERS:
        raise ConfigError(f"--num-layers {layers}: at most {MOST_LAYERS} can be priced")
    norm: Norm = "rms" if read.choice("normalization") == "RMSNorm" else "layer"
    learned = _positions(read) == "learned_absolute"
    mixed = _mixture_layers(read, layers)
    vocab, multiple = _vocabulary(read)
    return ModelShape(
        name="megatron",
        hidden=hidden,
        layers=tuple(
            LayerShape(
                attention=_attention(read, hidden, index, layers),
                mlp=_experts(read) if mixed[index] else _mlp(read, hidden),
            )
            for index in range(layers)
        ),
        vocab=vocab,
        vocab_multiple=multiple,
        head=Head(tied=not read.has("untie_embeddings_and_output_weights")),
        positions=read.number("max_position_embeddings") if learned else 0,
        norm=norm,
        hidden_dropout=read.share("hidden_dropout", 0.1),
        attention_dropout=read.share("attention_dropout", 0.1),
        mtp_layers=read.optional("mtp_num_layers") or 0,
        mtp_counted=True,
    )


def _refuse_unpriced(read: _Reader) -> None:
    """Models of another kind, by the flag that says so."""
    for name, what in _REFUSED.items():
        if read.has(name):
            raise ConfigError(f"cannot price {what} ({_flag(name)}) yet")


def _vocabulary(read: _Reader) -> tuple[int, int]:
    """The vocabulary, and what it is padded to a multiple of."""
    if read.has("padded_vocab_size"):
        return read.number("padded_vocab_size"), 1
    multiple = read.number("make_vocab_size_divisible_by", 128)
    if read.has("vocab_size"):
        return read.number("vocab_size"), multiple
    default = _ASSUMED if is_tokenizer_assumed(read.flags) else ""
    known = _TOKENIZERS.get(read.word("tokenizer_type", default))
    if known is None:
        raise ConfigError(
            "--vocab-size is missing, and the tokenizer does not say it: add --vocab-size N "
            "(GPT-2 50257, Llama 2 32000, Llama 3 128256, DeepSeek-V3 129280)"
        )
    return known, multiple


def is_tokenizer_assumed(flags: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the vocabulary is GPT-2's because nothing but a file of merges is named.

    `pretrain_gpt.py` takes GPT-2's tokenizer where no other is named, and that one needs the file.
    """
    named = {"tokenizer_type", "vocab_size", "padded_vocab_size"} & flags.keys()
    return not named and "merge_file" in flags


def _attention(read: _Reader, hidden: int, index: int, layers: int) -> Attention | LatentAttention:
    heads = read.number("num_attention_heads")
    bias = not read.has("disable_bias_linear")
    normed = read.has("qk_layernorm")
    if read.has("multi_latent_attention"):
        return LatentAttention(
            heads=heads,
            query_rank=read.optional("q_lora_rank"),
            kv_rank=read.number("kv_lora_rank", 32),
            plain_width=read.number("qk_head_dim", 128),
            rotary_width=read.number("qk_pos_emb_head_dim", 64),
            value_width=read.number("v_head_dim", 128),
            bias=bias,
            norms=normed,
        )
    if hidden % heads and not read.has("kv_channels"):
        raise ConfigError(
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}: "
            "give --kv-channels, the width of a head"
        )
    grouped = read.has("group_query_attention")
    groups = read.number("num_query_groups", 1) if grouped else heads
    if heads % groups:
        raise ConfigError(f"--num-query-groups {groups} does not divide the {heads} heads")
    return Attention(
        heads=heads,
        groups=groups,
        width=read.number("kv_channels", max(1, hidden // heads)),
        qkv_bias=bias or read.has("add_qkv_bias"),
        out_bias=bias,
        qk_norm="head" if normed else "none",
        qk_norm_kind="rms" if read.choice("normalization") == "RMSNorm" else "layer",
        rotary=_rotary(read) if _positions(read) in ("rope", "mrope", "yarn") else 0.0,
        window=_window(read, index),
        sinks=read.choice("softmax_type") == "learnable",
    )


def _positions(read: _Reader) -> str:
    """learned_absolute, rope or another name; older scripts have a switch for rope."""
    if read.has("use_rotary_position_embeddings"):
        return "rope"
    return read.choice("position_embedding_type")


def _rotary(read: _Reader) -> float:
    text = read.word("rotary_percent", "1.0")
    try:
        if 0 <= float(text) <= 1:
            return float(text)
    except ValueError:
        pass  # as if out of bounds
    raise ConfigError(f"--rotary-percent {text[:60]}: it must be a number from 0 to 1")


def _window(read: _Reader, index: int) -> int | None:
    """`--window-size 128,0`: tokens before, -1 for all, and behind.

    `--window-attn-skip-freq` N: every Nth layer is full, or a list with 0 for full ones.
    """
    if not read.has("window_size"):
        return None
    text = " ".join(read.flags.get("window_attn_skip_freq", ("0",)))
    if text.isdigit():
        is_full = int(text) > 0 and (index + 1) % int(text) == 0
    else:
        pattern = layer_pattern("--window-attn-skip-freq", text)
        is_full = index >= len(pattern) or not pattern[index]
    match = re.search(r"-?\d+", " ".join(read.flags["window_size"]))
    if match is None:
        raise ConfigError("--window-size needs two numbers, such as 4096,0")
    return None if is_full or int(match[0]) < 0 else int(match[0]) + 1


def _mlp(read: _Reader, hidden: int) -> Mlp:
    gated = read.has("swiglu") or read.has("quick_geglu")
    default = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    return Mlp(
        width=read.number("ffn_hidden_size", default),
        gated=gated,
        bias=not read.has("disable_bias_linear"),
        activation=_activation(read),
    )


def _activation(read: _Reader) -> Activation:
    if read.has("swiglu"):
        return "silu"
    return "relu2" if read.has("squared_relu") else "gelu"


def _experts(read: _Reader) -> Experts:
    hidden = read.number("hidden_size")
    dense = _mlp(read, hidden)
    count, chosen = read.number("num_experts"), read.number("moe_router_topk", 2)
    if chosen > count:
        raise ConfigError(f"--moe-router-topk {chosen}: there are --num-experts {count}")
    shared = read.optional("moe_shared_expert_intermediate_size")
    return Experts(
        count=count,
        chosen=chosen,
        width=read.number("moe_ffn_hidden_size", dense.width),
        gated=dense.gated,
        bias=dense.bias,
        activation=dense.activation,
        shared=None
        if shared is None
        else Mlp(width=shared, gated=dense.gated, bias=dense.bias, activation=dense.activation),
        shared_gate=read.has("moe_shared_expert_gate"),
        score_bias=read.has("moe_router_enable_expert_bias"),
    )


def _mixture_layers(read: _Reader, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: `--moe-layer-freq` N, every Nth, or a list as ([0]*3+[1]*58)."""
    if not read.has("num_experts") or read.optional("num_experts") is None:
        return (False,) * layers
    text = " ".join(read.flags.get("moe_layer_freq", ("1",)))
    if text.isdigit() and int(text):
        return tuple(index % int(text) == 0 for index in range(layers))
    pattern = layer_pattern("--moe-layer-freq", text)
    if len(pattern) != layers:
        raise ConfigError(
            f"--moe-layer-freq {text} names {len(pattern)} layers: --num-layers is {layers}"
        )
    return pattern


def given_by_flags(flags: Flags) -> Given:
    """What the flags say about splitting, recomputation and precision. Raises ConfigError."""
    read = _Reader(flags)
    return Given(
        tensor=read.optional("tensor_model_parallel_size"),
        sequence_parallel=True if read.has("sequence_parallel") else None,
        context=read.optional("context_parallel_size"),
        expert=read.optional("expert_model_parallel_size"),
        expert_tensor=read.optional("expert_tensor_parallel_size"),
        pipeline=read.optional("pipeline_model_parallel_size"),
        sequence=read.optional("seq_length"),
        microbatch=read.optional("micro_batch_size"),
        recompute=_recompute(read),
        flash=_flash(read),
        precision=_precision(read),
        sharding=_sharding(read),
        dispatcher="flex" if read.word("moe_token_dispatcher_type", "") == "flex" else None,
        dropless=not read.has("moe_expert_capacity_factor"),
    )


def _flash(read: _Reader) -> bool | None:
    if read.choice("attention_backend") in ("unfused", "local"):
        return False
    if read.has("use_flash_attn"):
        return True
    return False if read.word("transformer_impl", "") == "local" else None


def _recompute(read: _Reader) -> Recompute | None:
    told = read.word("recompute_granularity", "none")
    what = "selective" if read.has("recompute_activations") else told
    if what == "none" and not read.has("recompute_granularity"):
        return None
    is_selective = what == "selective"
    return Recompute().changed(
        what,
        layers=_recompute_layers(read) if what == "full" else None,
        modules=read.flags.get("recompute_modules") if is_selective else None,
    )


def _recompute_layers(read: _Reader) -> int | None:
    """Of the method block only: with uniform every layer is made again."""
    if read.choice("recompute_method") != "block":
        return None
    return read.optional("recompute_num_layers")


def _precision(read: _Reader) -> str | None:
    if read.has("fp8_format"):
        narrow = "fp8_mx" if read.word("fp8_recipe", "") == "mxfp8" else "fp8"
        return "fp8_weights" if read.has("fp8_param_gather") else narrow
    return next((name for name in ("bf16", "fp16") if read.has(name)), None)


def _sharding(read: _Reader) -> str | None:
    if read.has("data_parallel_sharding_strategy"):
        return read.word("data_parallel_sharding_strategy", "no_shard")
    return "optim" if read.has("use_distributed_optimizer") else None
