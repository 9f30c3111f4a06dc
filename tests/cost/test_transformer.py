"""FLOPs and parameters against published formulas, and against the models themselves."""

from __future__ import annotations

import pytest

from fullbore.cost.partition import partition
from fullbore.cost.transformer import Decoder, head_flops, layer_flops, piece_flops, step_flops
from fullbore.errors import ModelError

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
        "n_positions": 1024}  # fmt: skip


def test_smollm2_by_hand():
    decoder = Decoder.from_config(SMOLLM2)
    assert decoder.parameters == 134_515_008
    projections = 2 * 576 * 64 * (9 + 6) + 2 * 9 * 64 * 576
    mlp = 6 * 576 * 1536
    attention = 2 * 1024 * 9 * 64
    assert layer_flops(decoder, sequence=1024, causal=True) == projections + mlp + attention
    assert layer_flops(decoder, sequence=1024, causal=False) == projections + mlp + 2 * attention
    assert head_flops(decoder) == 2 * 576 * 49152


def test_the_head_of_smollm2_weighs_about_eight_layers():
    decoder = Decoder.from_config(SMOLLM2)
    for sequence in (64, 128, 256, 512):
        weight = head_flops(decoder) / layer_flops(decoder, sequence=sequence, causal=True)
        assert 7 < weight < 8.1
    # Two ranks: embedding and 19 layers against 11 layers and the head.
    assert partition(piece_flops(decoder, sequence=256, causal=True), 2) == (20, 12)


def test_the_published_formula_of_a_gpt():
    # 72 B L s h^2 (1 + s/6h + V/12hL), arXiv:2104.04473: GELU MLP, attention counted whole.
    batch, sequence, layers, hidden, vocab = 16, 2048, 24, 2304, 51200
    decoder = Decoder.from_config(
        GPT2 | {"n_embd": hidden, "n_layer": layers, "n_head": 24, "vocab_size": vocab}
    )
    published = 72 * batch * layers * sequence * hidden**2
    published *= 1 + sequence / (6 * hidden) + vocab / (12 * hidden * layers)
    found = step_flops(decoder, sequence=sequence, sequences=batch, causal=False)
    assert found == pytest.approx(published, rel=1e-12)


def test_a_step_is_three_forwards_of_every_token():
    decoder = Decoder.from_config(SMOLLM2)
    pieces = piece_flops(decoder, sequence=128, causal=True)
    assert len(pieces) == 32
    assert pieces[0] == 0
    found = step_flops(decoder, sequence=128, sequences=5, causal=True)
    assert found == pytest.approx(3 * 5 * 128 * sum(pieces))


def test_gpt2_by_hand():
    decoder = Decoder.from_config(GPT2)
    assert decoder.parameters == 124_439_808  # published as 124M
    assert (decoder.gated, decoder.ffn, decoder.kv_heads) == (False, 3072, 12)
    assert decoder.layer_parameters == 7_087_872
    assert decoder.embedding_parameters == (50257 + 1024) * 768


def test_an_untied_head_has_parameters_of_its_own():
    tied = Decoder.from_config(SMOLLM2)
    untied = Decoder.from_config(SMOLLM2 | {"tie_word_embeddings": False})
    assert untied.parameters - tied.parameters == 49152 * 576 == untied.head_parameters


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SMOLLM2 | {"model_type": "mixtral"}, "type 'mixtral'.*known are llama"),
        ({**SMOLLM2, "model_type": None}, "type None"),
        (SMOLLM2 | {"num_local_experts": 8}, r"a mixture of experts \(num_local_experts = 8\)"),
        (SMOLLM2 | {"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent attention"),
        (SMOLLM2 | {"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        (GPT2 | {"add_cross_attention": True}, "cross-attention"),
        ({k: v for k, v in SMOLLM2.items() if k != "hidden_size"}, "hidden_size is missing"),
        (SMOLLM2 | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (SMOLLM2 | {"vocab_size": "big"}, "vocab_size is 'big'"),
        ({k: v for k, v in GPT2.items() if k != "n_embd"}, "n_embd is missing"),
        ({k: v for k, v in (SMOLLM2 | {"model_type": "qwen3"}).items() if k != "head_dim"},
         "head_dim is missing"),
    ],
)  # fmt: skip
def test_what_has_no_price_is_refused_by_name(config, message):
    with pytest.raises(ModelError, match=message):
        Decoder.from_config(config)


def test_a_window_shorter_than_the_sequence_is_refused():
    decoder = Decoder.from_config(SMOLLM2 | {"model_type": "mistral", "sliding_window": 512})
    full = Decoder.from_config(SMOLLM2 | {"model_type": "mistral", "sliding_window": None})
    assert layer_flops(decoder, sequence=512, causal=True) == layer_flops(
        full, sequence=512, causal=True
    )
    with pytest.raises(ModelError, match="sliding_window of 512 under a sequence of 513"):
        layer_flops(decoder, sequence=513, causal=True)


def test_a_window_that_is_not_used_does_not_count():
    qwen = SMOLLM2 | {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False}
    assert Decoder.from_config(qwen).window is None


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SMALL_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000, "bos_token_id": 0,
              "eos_token_id": 0}  # fmt: skip
FAMILIES = ["llama", "smollm3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text",
            "phi3", "phi", "gpt2", "gpt_neox"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_flops_are_those_of_the_real_model(family):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for extra in (
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": False, "tie_word_embeddings": True},
        {"tie_word_embeddings": False},
    ):
        base = dict(SMALL_GPT2 if family == "gpt2" else SMALL)
        if family not in ("llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3_text"):
            base.pop("head_dim", None)  # theirs follows from the others
        config = transformers.CONFIG_MAPPING[family](**base, **extra)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        decoder = Decoder.from_config(config.to_dict())
        assert decoder.parameters == sum(p.numel() for p in model.parameters())
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        assert decoder.layer_parameters == sum(p.numel() for p in layers[0].parameters())
        # Every matrix of the layer is used once a token: 2 FLOPs an entry, and attention.
        entries = sum(p.numel() for p in layers[0].parameters() if p.dim() == 2)
        assert layer_flops(decoder, sequence=32, causal=False) == (
            2 * entries + 4 * 32 * decoder.heads * decoder.head_dim
        )
