"""`fullbore model`: what is printed, what JSON holds, and how wrong input is refused."""

from __future__ import annotations

import json
import re

import pytest
from priced import CONFIGS, SMOLLM2

LLAMA, MIXTRAL = CONFIGS / "llama3-8b", CONFIGS / "mixtral-8x7b"
GPT3 = CONFIGS / "gpt3-175b.sh"
KEYS = {
    *("model", "family", "layers", "hidden", "vocab", "parameters", "active_parameters"),
    *("mtp_layers_not_counted", "conventions", "forward_flops_per_token"),
    *("model_flops_per_token", "hardware_flops_per_token", "mfu", "hfu", "rank_parameters"),
    *("weights_bytes", "gradients_bytes", "optimizer_bytes", "kept_bytes", "pieces"),
}
PIECE_KEYS = {
    *("title", "kind", "indices", "parameters", "forward_flops", "input_grad_flops"),
    *("weight_grad_flops", "recomputed_flops", "kept_bytes", "kept_until_weight_bytes"),
    *("held_bytes", "rebuilt_bytes", "products", "weights", "kept", "held", "rebuilt"),
    *("traffic", "collectives", "launches"),
}


def test_json_has_the_documented_keys_and_they_add_up(fullbore):
    found = fullbore("model", LLAMA, "--json").json
    assert set(found) == KEYS
    assert {frozenset(piece) for piece in found["pieces"]} == {frozenset(PIECE_KEYS)}
    assert found["parameters"] == found["rank_parameters"] == 8_030_261_248
    first, layers, last = found["pieces"]
    assert layers["indices"] == list(range(32))
    total = first["kept_bytes"] + 32 * layers["kept_bytes"] + last["kept_bytes"]
    assert found["kept_bytes"] == pytest.approx(total)
    products = sum(
        2 * p["rows"] * p["inner"] * p["columns"] * p["count"] * p["share"]
        for p in layers["products"]
    )
    assert layers["forward_flops"] == pytest.approx(products)
    assert found["weights_bytes"] == 2 * found["parameters"]
    assert found["optimizer_bytes"] == 12 * found["parameters"]


def test_the_table_reads(fullbore):
    out = fullbore("model", LLAMA, "--seq-length", 8192).out
    assert "llama3-8b (llama): 32 layers, hidden 4096, vocabulary 128256: 8 030 261 248" in out
    assert "bf16, fused kernels with flash attention, recomputed: nothing" in out
    assert "attention without the half that the mask hides" in out
    assert "layers 0-31" in out
    assert "experts" not in out


def test_every_tensor_is_explained(fullbore):
    out = fullbore("model", MIXTRAL, "--explain").out
    for name in ("experts gate and up", "8 times 1 024 x 4096 x 28672", "router scores"):
        assert name in out
    assert "12.88 billion of them for each token" in out


def test_kernels_are_told_with_who_starts_them(fullbore):
    flags = ("--fp8", "--explain", "--cuda-graph-impl", "transformer_engine")
    out = fullbore("model", MIXTRAL, *flags, "--cuda-graph-modules", "attn,moe_router").out
    lines = [line.split() for line in out.splitlines()]
    (experts,) = (line for line in lines if line[:1] == ["moe"])
    assert "+ 16 casts" in " ".join(experts)  # of 8 experts, two products each
    assert experts[-2:] == ["the", "host"]
    assert ["a", "graph"] in [line[-2:] for line in lines if line[:1] == ["attn"]]
    refused = fullbore("model", MIXTRAL, "--cuda-graph-impl", "graph")
    assert "--cuda-graph-impl graph: it must be none, local" in refused.err


def test_conventions_are_printed_and_matter(fullbore):
    whole = fullbore("model", LLAMA, "--no-causal")
    assert "attention counted whole" in whole.out
    full = fullbore("model", LLAMA, "--recompute-granularity", "full").out
    assert "every layer, all but its input" in full
    assert re.search(r"makes [\d.]+ MiB again", full)
    some = fullbore(
        "model", LLAMA, "--recompute-granularity", "full", "--recompute-num-layers", 2
    ).out
    assert "layers 0-1 " in some
    assert "layers 2-31" in some
    eager = fullbore("model", LLAMA, "--kernels", "eager", "--no-flash-attn", "--fp32").out
    assert "fp32, eager kernels without flash attention" in eager


def test_mfu_and_hfu(fullbore):
    flags = ("--tokens-per-s-per-gpu", 8000, "--peak-tflops", 989, "--seq-length", 8192)
    found = fullbore("model", LLAMA, *flags, "--recompute-granularity", "full", "--json").json
    assert found["mfu"] == pytest.approx(8000 * found["model_flops_per_token"] / 989e12)
    assert found["hfu"] == pytest.approx(8000 * found["hardware_flops_per_token"] / 989e12)
    assert 0.3 < found["mfu"] < found["hfu"] < 0.6
    assert "MFU 41.6 %, HFU 41.6 %" in fullbore("model", LLAMA, *flags).out


def test_flags_of_megatron_hold_unless_they_are_given(fullbore):
    found = fullbore("model", "--megatron", GPT3, "--json").json
    told = found["conventions"]
    assert (told["tensor"], told["sequence"], told["sequence_parallel"]) == (8, 2048, True)
    assert (told["precision"], told["sharding"]) == ("bf16", "optim")
    other = fullbore(
        "model",
        "--megatron",
        GPT3,
        "--tensor-model-parallel-size",
        4,
        "--recompute-granularity",
        "selective",
        "--no-flash-attn",
        "--fp16",
        "--json",
    ).json
    assert other["conventions"]["tensor"] == 4
    assert other["conventions"]["precision"] == "fp16"
    # 34sbh/t: the published bytes of a layer with selective recomputation.
    assert other["pieces"][1]["kept_bytes"] == 34 * 2048 * 12288 / 4


def test_an_argument_string_is_read(fullbore):
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 "
    flags += "--max-position-embeddings 32"
    found = fullbore("model", "--megatron", flags, "--json").json
    assert found["model"] == "Megatron flags"
    assert found["conventions"]["sequence"] == 32


def test_replicas_share_out_the_optimizer(fullbore):
    flags = ("--use-distributed-optimizer", "--data-parallel-size", 8)
    found = fullbore("model", LLAMA, *flags, "--json").json
    assert found["optimizer_bytes"] == 12 / 8 * found["parameters"]
    out = fullbore("model", LLAMA, *flags).out
    assert "7.5 bytes a parameter (optim, 8 replicas)" in out


def test_multi_token_prediction_is_named(fullbore):
    ran = fullbore("model", CONFIGS / "deepseek-v3")
    assert "not counted: multi-token prediction, 1 layer of the configuration" in ran.out
    assert "layers 3-60" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one model"),
        ((LLAMA, "--megatron", "--num-layers 2"), "give one model"),
        (("nowhere",), "no file nowhere: give a Hugging Face config.json"),
        ((CONFIGS,), "no file .*config.json"),
        (("--megatron", "train.sh"), "no --flag is in 'train.sh'"),
        ((LLAMA, "--tensor-model-parallel-size", 3), "does not divide the 32 attention heads"),
        ((LLAMA, "--kernels", "fast"), "--kernels fast: it must be eager or fused"),
        ((LLAMA, "--recompute-granularity", "some"), "it must be none, selective or full"),
        ((LLAMA, "--recompute-num-layers", 2), "needs --recompute-granularity full"),
        ((LLAMA, "--bf16", "--fp8-param-gather"), "--bf16 and --fp8-param-gather: give one"),
        ((LLAMA, "--peak-tflops", 989), "MFU needs both"),
        ((LLAMA, "--peak-tflops", 0, "--tokens-per-s-per-gpu", 1), "--peak-tflops 0"),
        ((LLAMA, "--peak-tflops", "inf", "--tokens-per-s-per-gpu", 1), "--peak-tflops inf"),
        ((LLAMA, "--expert-tensor-parallel-size", 0), "--expert-tensor-parallel-size 0: it must"),
        ((LLAMA, "--data-parallel-size", 0), "--data-parallel-size 0: it must be 1 or more"),
        ((LLAMA, "--data-parallel-sharding-strategy", "x"), "no sharding is called 'x'"),
        ((CONFIGS / "gpt2", "--seq-length", 2048), "learned 1024 positions; use at most 1024"),
    ],
)
def test_wrong_input_is_refused_by_name(fullbore, arguments, message):
    ran = fullbore("model", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert re.search(message, ran.err), ran.err


def test_an_unknown_architecture_is_refused_by_name(fullbore, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SMOLLM2, "model_type": "perceiver"}))
    ran = fullbore("model", file)
    assert (ran.status, ran.out) == (2, "")
    assert "cannot price a model of type 'perceiver' (model_type); known are bloom" in ran.err
