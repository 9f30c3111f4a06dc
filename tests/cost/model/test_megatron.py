"""Megatron's flags in every form in which people keep them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from priced import CONFIGS, example, priced

from fullbore.cost.model import Recompute
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.megatron import given_by_flags, shape_of_flags
from fullbore.cost.model.script import flags_of, read_flags
from fullbore.cost.model.shape import LatentAttention
from fullbore.cost.model.totals import parameters
from fullbore.errors import ConfigError

LLAMA3_8B = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm
--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
--vocab-size 128256 --hidden-dropout 0 --attention-dropout 0.0 --seq-length 8192
--tensor-model-parallel-size 4 --sequence-parallel --bf16 --use-distributed-optimizer
""".replace("\n", " ")

DEEPSEEK = """
--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --swiglu --normalization RMSNorm
--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
--padded-vocab-size 129280 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
--moe-layer-freq ([0]*3+[1]*58) --moe-shared-expert-intermediate-size 2048
--mtp-num-layers 1 --hidden-dropout 0 --attention-dropout 0
""".replace("\n", " ")


def changed(flags, old, new=""):
    assert old in flags
    return flags.replace(old, new)


def test_llama_in_flags_is_llama_in_a_configuration():
    flags = flags_of(LLAMA3_8B)
    found, told = priced(shape_of_flags(flags)), priced(example("llama3-8b"))
    assert parameters(found) == parameters(told) == 8_030_261_248
    assert found[1:-1] == told[1:-1]
    given = given_by_flags(flags)
    assert (given.tensor, given.sequence_parallel, given.sequence) == (4, True, 8192)
    assert (given.precision, given.sharding, given.flash) == ("bf16", "optim", None)


def test_deepseek_in_flags_is_deepseek_in_a_configuration():
    shape, told = shape_of_flags(flags_of(DEEPSEEK)), example("deepseek-v3")
    assert isinstance(shape.layers[0].attention, LatentAttention)
    plain = priced(replace(shape, mtp_counted=False))
    assert parameters(plain) == parameters(priced(told))
    assert shape.mtp_layers == shape_of(told).mtp_layers


def test_a_layer_of_multi_token_prediction_is_with_the_head():
    """One more layer, two norms before a product [2h, h], a norm, and the head's work again."""
    shape = shape_of_flags(flags_of(DEEPSEEK))
    made, plain = priced(shape), priced(replace(shape, mtp_counted=False))
    assert made[:-1] == plain[:-1]
    h, (last, layer), head = shape.hidden, plain[-2:][::-1], made[-1]
    joins = 2 * h * h
    assert parameters(made) - parameters(plain) == layer.parameters + joins + 3 * h
    tied = sum(one.count for one in head.weights if one.tied)
    assert tied == last.parameters - h  # an embedding of its own, as large as the logits
    joined = 2 * 4096 * joins
    assert head.forward_flops == 2 * last.forward_flops + layer.forward_flops + joined
    kept = 2 * last.kept_bytes + layer.kept_bytes
    assert head.kept_bytes == pytest.approx(kept, rel=0.2) and head.kept_bytes > kept


def test_gpt3_as_a_script():
    # 96 layers x (12h² + 13h), positions, final norm, and 50304 rows of the embedding.
    flags = read_flags(str(CONFIGS / "gpt3-175b.sh"))
    h = 12288
    published = 96 * (12 * h * h + 13 * h) + 2048 * h + 2 * h + 50304 * h
    assert parameters(priced(shape_of_flags(flags), sequence=2048)) == published == 174_604_836_864
    given = given_by_flags(flags)
    assert (given.tensor, given.pipeline, given.microbatch) == (8, 8, 1)
    assert flags["nnodes"] == ("8",)


def test_a_vocabulary_is_padded_for_its_ranks():
    from fullbore.cost.model import Split

    shape = shape_of_flags(read_flags(str(CONFIGS / "gpt3-175b.sh")))
    embedding = priced(shape, sequence=2048, split=Split(tensor=8))[0]
    assert embedding.weights[0].count == 51200 / 8 * 12288


SCRIPT = r"""
#!/bin/bash
export HIDDEN=512
LAYERS=${1:-12}
HEADS=8   # a comment with --num-layers 99
WIDTH=$((HIDDEN * 4))
# --hidden-size 1
MODEL="--num-layers $LAYERS --hidden-size ${HIDDEN}"
OPTIONS=" \
    --num-attention-heads ${HEADS} \
    --max-position-embeddings 1024 \
"
ARGS=(
    --ffn-hidden-size $WIDTH
    --vocab-size=32000
    --lr -0.5
)
if [ "$DEBUG" = 1 ]; then ARGS+=(--bf16); fi
torchrun --nproc-per-node 8 pretrain_gpt.py $MODEL $OPTIONS "${ARGS[@]}" --window-size "(128,0)"
"""


def test_a_shell_script_is_understood(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    flags = read_flags(str(script))
    assert flags["hidden_size"] == ("512",)
    assert flags["num_layers"] == ("12",)
    assert flags["num_attention_heads"] == ("8",)
    assert flags["ffn_hidden_size"] == ("2048",)
    assert flags["vocab_size"] == ("32000",)
    assert flags["lr"] == ("-0.5",)
    assert flags["bf16"] == ()
    assert flags["window_size"] == ("(128,0)",)
    shape = shape_of_flags(flags)
    assert len(shape.layers) == 12
    assert shape.layers[0].attention.window == 129


def test_what_the_shell_does_with_the_output_is_no_value():
    flags = flags_of("torchrun x.py --num-layers 12 --bf16 2>&1 | tee log.txt && echo done")
    assert flags == {"num_layers": ("12",), "bf16": ()}
    assert flags_of("--lr 1 >> log.txt")["lr"] == ("1",)
    assert flags_of("--layout 'Et|tL' &> log")["layout"] == ("Et|tL",)


def test_a_yaml_file_is_understood(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "flags.yaml"
    file.write_text(
        "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\n"
        "MODEL_ARGS:\n  --num-layers: 12\n  --hidden-size: 512\n  --num-attention-heads: 8\n"
        "  --max-position-embeddings: 1024\n  --vocab-size: 1000\n  --swiglu: true\n"
        "  --bf16: false\n  add_bias_linear: false\nlanguage_model:\n  micro_batch_size: 2\n"
    )
    flags = read_flags(str(file))
    assert flags["swiglu"] == ()
    assert "bf16" not in flags and flags["disable_bias_linear"] == ()
    assert shape_of_flags(flags).layers[0].mlp.width == int(4 * 512 * 2 / 3 / 64) * 64
    assert given_by_flags(flags).microbatch == 2
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds no mapping"):
        read_flags(str(file))


@pytest.mark.parametrize(
    ("flags", "what", "layers"),
    [
        ("--recompute-activations", "selective", None),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "full",
            3,
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "full",
            None,
        ),
        ("--bf16", None, None),
    ],
)
def test_recomputation_as_flags_say_it(flags, what, layers):
    given = given_by_flags(flags_of(flags))
    told = given.recompute
    assert told == (what and Recompute(granularity=what, layers=layers))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (changed(LLAMA3_8B, "--hidden-size 4096"), "--hidden-size is missing"),
        (changed(LLAMA3_8B, "--vocab-size 128256"), "--vocab-size is missing.*Llama 3 128256"),
        (changed(LLAMA3_8B, "--num-layers 32", "--num-layers many"), "--num-layers many: it must"),
        (changed(LLAMA3_8B, "--num-layers 32", "--num-layers 0"), "--num-layers 0: it must be 1"),
        (changed(LLAMA3_8B, "groups 8", "groups 5"), "--num-query-groups 5 does not divide the 32"),
        (changed(LLAMA3_8B, "rope", "learned_absolute"), "--max-position-embeddings is missing"),
        (LLAMA3_8B + " --encoder-num-layers 3", r"an encoder \(--encoder-num-layers\)"),
        (LLAMA3_8B + " --hidden-dropout 2", "--hidden-dropout 2: it must be 0 or more and below"),
        (changed(DEEPSEEK, "*58", "*57"), "names 60 layers: --num-layers is 61"),
        (changed(DEEPSEEK, "([0]*3+[1]*58)", "often"), "must be a number, or a list such as"),
        (changed(DEEPSEEK, "topk 8", "topk 300"), "--moe-router-topk 300: there are --num-experts"),
        (changed(DEEPSEEK, "([0]*3+[1]*58)", "0"), "--moe-layer-freq 0: it must be a number, or"),
        (LLAMA3_8B + " --rotary-percent nan", "--rotary-percent nan: it must be a number from 0"),
        (changed(LLAMA3_8B, "RMSNorm", "RmsNorm"), "RmsNorm: use LayerNorm or RMSNorm"),
        (changed(LLAMA3_8B, "rope", "Rope"), "type Rope: use learned_absolute or rope or mrope"),
        (changed(DEEPSEEK, "*58", "*58000000000"), "must be a number, or a list such as"),
        (
            changed(LLAMA3_8B, "--num-layers 32", "--num-layers 99999"),
            "at most 10000 can be priced",
        ),
        (
            changed(LLAMA3_8B, "size 4096", "size 1" + 30 * "0"),
            "--hidden-size 1000.* it must be 1 to 1e.12",
        ),
        (LLAMA3_8B + " --is-hybrid-model", "state-space layers .--is-hybrid-model"),
    ],
)
def test_wrong_flags_are_refused_by_name(flags, message):
    with pytest.raises(ConfigError, match=message):
        shape_of_flags(flags_of(flags))


@pytest.mark.parametrize(
    ("flags", "windows"),
    [
        ("--window-size 127,0", [128] * 4),
        ("--window-size (-1,-1)", [None] * 4),
        ("--window-size 127,0 --window-attn-skip-freq 2", [128, None, 128, None]),
        ("--window-size 127,0 --window-attn-skip-freq [1]*3+[0]", [128, 128, 128, None]),
    ],
)
def test_windows_as_flags_say_them(flags, windows):
    shape = shape_of_flags(flags_of(changed(LLAMA3_8B, "layers 32", "layers 4") + flags))
    assert [layer.attention.window for layer in shape.layers] == windows


def test_an_mlp_is_gated_by_either_flag():
    geglu = changed(LLAMA3_8B, "--swiglu", "--quick-geglu")
    assert shape_of_flags(flags_of(geglu)).layers[0].mlp.gated


def test_what_selective_recomputation_makes_again_is_read():
    told = "--recompute-granularity selective --recompute-modules "
    plain = Recompute(granularity="selective")
    assert given_by_flags(flags_of(told + "core_attn")).recompute == plain
    given = given_by_flags(flags_of(told + "moe layernorm")).recompute
    assert given == Recompute(granularity="selective", modules=("layernorm", "moe"))
    with pytest.raises(ConfigError, match="--recompute-modules norms: it must be of core_attn, la"):
        given_by_flags(flags_of(told + "norms"))
    # Without that granularity Megatron-LM does not look at them.
    assert given_by_flags(flags_of("--recompute-modules mlp")).recompute is None


def test_a_text_without_flags_is_refused():
    with pytest.raises(ConfigError, match=r"no --flag is in 'train.sh': give Megatron's arguments"):
        read_flags("train.sh")
