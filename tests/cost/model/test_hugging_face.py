"""Configurations that cannot be priced are refused by the name of their key."""

from __future__ import annotations

import pytest
from priced import SMOLLM2, example, priced

from fullbore.cost.model.config import read_config
from fullbore.cost.model.hugging_face import shape_of
from fullbore.errors import ModelError

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "n_positions": 1024}  # fmt: skip


def without(config, key):
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SMOLLM2 | {"model_type": "mamba"}, "type 'mamba'.*known are bloom, cohere"),
        (SMOLLM2 | {"model_type": None}, "model_type is missing"),
        (SMOLLM2 | {"num_local_experts": 8}, "num_local_experts says a mixture of experts"),
        (SMOLLM2 | {"kv_lora_rank": 512}, "kv_lora_rank says latent attention"),
        (SMOLLM2 | {"text_config": {}, "layer_types": ["linear_attention"] * 30}, "'linear_atten"),
        (SMOLLM2 | {"text_config": {"a": 1}}, "a model of several parts"),
        (GPT2 | {"add_cross_attention": True}, "cross-attention"),
        (without(SMOLLM2, "hidden_size"), "hidden_size is missing"),
        (SMOLLM2 | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (SMOLLM2 | {"vocab_size": "big"}, "vocab_size is 'big'"),
        (SMOLLM2 | {"num_key_value_heads": 2}, "num_key_value_heads is 2: it must divide the 9"),
        (SMOLLM2 | {"hidden_act": "swoosh"}, "'swoosh' .hidden_act.*known are gelu"),
        (without(GPT2, "n_embd"), "n_embd is missing"),
        (without(SMOLLM2, "head_dim") | {"model_type": "qwen3"}, "head_dim is missing"),
        (SMOLLM2 | {"model_type": "mixtral"}, "num_local_experts is missing"),
        (SMOLLM2 | {"model_type": "mixtral", "num_local_experts": 4}, "num_experts_per_tok is mis"),
        (
            SMOLLM2 | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5: there are 4 experts",
        ),
        (SMOLLM2 | {"model_type": "deepseek_v3"}, "kv_lora_rank is missing"),
        (without(SMOLLM2, "intermediate_size"), "intermediate_size is missing"),
        (without(SMOLLM2, "head_dim") | {"hidden_size": 577}, "num_attention_heads is 9: it must"),
        (SMOLLM2 | {"tie_word_embeddings": "false"}, "'false': it must be true or false"),
        (SMOLLM2 | {"hidden_size": 576.0}, "hidden_size is 576.0 .* must be a whole number, 1"),
        (SMOLLM2 | {"hidden_size": 10**30}, "hidden_size is 1000.* number, 1 to 1e.12"),
        (SMOLLM2 | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: at most 10000"),
        (SMOLLM2 | {"layer_types": "full"}, "layer_types is 'full': it must be a list"),
        (SMOLLM2 | {"layer_types": ["full_attention"]}, "names 1 layers: num_hidden_layers is 30"),
        (SMOLLM2 | {"model_type": "mistral"}, "sliding_window is missing in .* this mistral model"),
    ],
)
def test_what_has_no_price_is_refused_by_name(config, message):
    with pytest.raises(ModelError, match=message):
        shape_of(config)


NONSENSE = (None, "", "x", -1, 0, 1.5, float("nan"), [], ["x"], {}, {"a": 1}, True, 10**30)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "mixtral-8x7b", "deepseek-v3"])
def test_nonsense_is_refused_by_the_name_of_its_key_or_priced(name):
    config = example(name)
    layers = next(key for key in ("num_hidden_layers", "n_layer") if key in config)
    config |= {layers: 4}
    for key in config.keys() - {layers}:
        for value in NONSENSE:
            try:
                shape = shape_of(config | {key: value})
            except ModelError as error:
                assert key in str(error), (key, value)
                continue
            assert priced(shape, sequence=64), (key, value)


def test_older_names_of_a_key_are_understood():
    bloom = {"model_type": "bloom", "n_embed": 64, "n_layer": 2, "num_attention_heads": 8,
             "vocab_size": 512, "n_inner": None}  # fmt: skip
    shape = shape_of(bloom)
    assert (shape.hidden, shape.layers[0].attention.heads, shape.layers[0].mlp.width) == (
        64,
        8,
        256,
    )
    gemma = SMOLLM2 | {"model_type": "gemma", "hidden_activation": None}
    assert shape_of(gemma).layers[0].mlp.activation == "gelu"


def test_gpt2_by_hand():
    shape = shape_of(GPT2)
    mlp = shape.layers[0].mlp
    assert (mlp.gated, mlp.width, mlp.activation) == (False, 3072, "gelu_spelled")
    assert (shape.positions, shape.hidden_dropout, shape.head.tied) == (1024, 0.1, True)


def test_a_window_that_is_not_used_does_not_count():
    qwen = SMOLLM2 | {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}
    assert {layer.attention.window for layer in shape_of(qwen).layers} == {None}


def test_a_file_that_is_no_configuration_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no file .*config.json: give a Hugging Face"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .* as JSON"):
        read_config(tmp_path)
    for text in ("1" * 5000, "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"cannot read .* as JSON"):
            read_config(tmp_path)
    with pytest.raises(ModelError, match=r"cannot read .* as JSON"):
        read_config(tmp_path / ("a" * 5000))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_config(tmp_path)
