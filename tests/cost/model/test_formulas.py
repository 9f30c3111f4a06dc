"""Prices against published formulas: FLOPs, bytes kept, states, messages."""

from __future__ import annotations

import pytest
from priced import SMOLLM2, example, kept, priced

from fullbore.cost.model import Kernels, Precision, Recompute, Split
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.megatron import shape_of_flags
from fullbore.cost.model.script import flags_of
from fullbore.cost.model.states import states, states_of_pieces
from fullbore.cost.model.totals import active_parameters, parameters, totals
from fullbore.cost.partition import partition
from fullbore.errors import ConfigError

GPT = "--num-layers 24 --hidden-size 2304 --num-attention-heads 24 --vocab-size 51200 "
GPT += "--max-position-embeddings 2048"
SELECTIVE, FULL = Recompute(granularity="selective"), Recompute(granularity="full")


def exact(number):
    """The same number but for the last bits of a sum of floats."""
    return pytest.approx(number, rel=1e-12)


def gpt():
    return shape_of_flags(flags_of(GPT))


def test_smollm2_by_hand():
    pieces = priced(SMOLLM2, sequence=1024)
    assert parameters(pieces) == 134_515_008
    projections = 2 * 576 * 64 * (9 + 6) + 2 * 9 * 64 * 576
    mlp = 6 * 576 * 1536
    attention = 2 * 1024 * 9 * 64
    assert pieces[1].forward_flops == 1024 * (projections + mlp + attention)
    whole = priced(SMOLLM2, sequence=1024, causal=False)
    assert whole[1].forward_flops == 1024 * (projections + mlp + 2 * attention)
    assert pieces[-1].forward_flops == 1024 * 2 * 576 * 49152
    assert pieces[0].forward_flops == 0


def test_the_head_of_smollm2_weighs_about_eight_layers():
    for sequence in (64, 128, 256, 512):
        pieces = priced(SMOLLM2, sequence=sequence)
        assert 7 < pieces[-1].forward_flops / pieces[1].forward_flops < 8.1
    # Two ranks: embedding and 19 layers against 11 layers and the head.
    assert partition([piece.forward_flops for piece in priced(SMOLLM2, sequence=256)], 2) == (
        20,
        12,
    )


def test_the_published_flops_of_a_gpt_and_of_its_halves():
    # 72 B L s h^2 (1 + s/6h + V/12hL), arXiv:2104.04473; F, I, W of a layer as in FACTS, 4.
    s, h, layers, vocab, batch = 2048, 2304, 24, 51200, 2
    pieces = priced(gpt(), sequence=s, microbatch=batch, causal=False)
    published = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert totals(pieces).model_flops == pytest.approx(published, rel=1e-12)
    layer = pieces[1]
    assert layer.forward_flops == s * batch * h * (24 * h + 4 * s)
    assert layer.input_grad_flops == s * batch * h * (24 * h + 8 * s)
    assert layer.weight_grad_flops == 24 * s * batch * h**2


@pytest.mark.parametrize("batch", [1, 4])
def test_the_published_bytes_of_a_gpt_layer(batch):
    # arXiv:2205.05198, equations 1, 2, 4 and 6; table 2.
    s, h, a = 2048, 2304, 24
    unfused = Kernels(flash=False)
    sbh = s * batch * h

    def layer(kernels=unfused, **changes):
        return priced(gpt(), sequence=s, microbatch=batch, kernels=kernels, **changes)[1].kept_bytes

    assert layer() == exact(sbh * (34 + 5 * a * s / h))
    assert layer(recompute=SELECTIVE) == 34 * sbh
    assert layer(recompute=FULL) == 2 * sbh
    for t in (2, 4, 8):
        both = Split(tensor=t, sequence_parallel=True)
        tensor = sbh * (10 + 24 / t + 5 * a * s / (h * t))
        assert layer(split=Split(tensor=t)) == exact(tensor)
        assert layer(split=both) == exact(sbh / t * (34 + 5 * a * s / h))
        assert layer(split=both, recompute=SELECTIVE) == 34 * sbh / t
        # Flash attention keeps one number a head and token besides.
        assert layer(Kernels(), split=both) == (34 * sbh + 4 * s * batch * a) / t


def test_the_published_bytes_of_the_ends_of_a_gpt():
    # arXiv:2205.05198, section 4.3: a dropout mask; 4 sbh (1 + v/h) for norm, logits input, logits.
    s, h, vocab = 2048, 2304, 51200
    first, *_, last = priced(gpt(), sequence=s)
    assert kept(first) == {"token ids": 8 * s, "embedding dropout mask": s * h}
    assert last.kept_bytes == exact(4 * s * h * (1 + vocab / h))


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "llama3-405b", "qwen2.5-72b"])
@pytest.mark.parametrize(("t", "cp"), [(1, 1), (8, 1), (4, 2)])
def test_the_bytes_of_a_modern_layer(name, t, cp):
    # [s·b(12h + 4h·g/a + 6f) + 4·s·b·a]/t, and a share of it with context parallelism.
    config, s = example(name), 8192
    h, a, g, f = (
        config[key]
        for key in (
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
        )
    )
    split = Split(tensor=t, sequence_parallel=t > 1, context=cp)
    layer = priced(config, sequence=s, split=split)[1]
    assert layer.kept_bytes == exact(s * (12 * h + 4 * h * g / a + 6 * f + 4 * a) / t / cp)


def test_the_bytes_of_a_layer_with_experts():
    # 6f becomes topk·(6f_expert + 4h); the router's scores, 4 bytes an expert, come on top.
    config, s = example("mixtral-8x7b"), 4096
    split = Split(tensor=2, sequence_parallel=True, expert=4, expert_tensor=1)
    layer = priced(config, sequence=s, split=split)[1]
    h, f = 4096, 14336
    expected = s * (12 * h + 4 * h * 8 / 32 + 2 * (6 * f + 4 * h) + 4 * 32 + 4 * 8) / 2
    assert layer.kept_bytes == expected
    shared = example("deepseek-v3")
    deep = kept(priced(shared, sequence=s)[-2])
    assert deep["shared expert gate"] == deep["shared expert up"] == 2 * s * 2048
    assert deep["experts input"] == deep["experts output"] == 8 * s * 7168 * 2


def test_flops_of_experts_are_those_that_tokens_meet():
    # FACTS, section 7: f becomes topk·f_expert + shared, plus the router 2hE.
    h, d, a, g, s = 4096, 128, 32, 8, 4096
    layer = priced(example("mixtral-8x7b"), sequence=s)[1]
    attention = 2 * h * d * (a + 2 * g) + 2 * a * d * h + 2 * s * a * d
    assert layer.forward_flops == s * (attention + 2 * 3 * h * 2 * 14336 + 2 * h * 8)


def test_latent_attention_by_hand():
    # arXiv:2405.04434: queries through 1536, keys and values through 512 (+64 rotated).
    s, h, a = 4096, 7168, 128
    dense = priced(example("deepseek-v3"), sequence=s)[1]
    narrow = h * 1536 + 1536 * a * 192 + h * (512 + 64) + 512 * a * 256 + a * 128 * h
    cores = s * a * (192 + 128)  # causal: 2 x s/2 x (192 + 128)
    assert dense.forward_flops == s * (2 * narrow + cores + 2 * 3 * h * 18432)
    assert dense.parameters == narrow + 3 * h * 18432 + 1536 + 512 + 2 * h


def test_a_mixture_meets_only_some_of_its_parameters():
    # DeepSeek-V3: 37B of 671B for each token (arXiv:2412.19437); Mixtral 12.9B of 46.7B.
    for name, active in (("deepseek-v3", 37.55e9), ("mixtral-8x7b", 12.88e9)):
        shape = shape_of(example(name))
        assert active_parameters(shape, priced(shape)) == pytest.approx(active, rel=1e-3)


def test_multi_token_prediction_is_counted_apart():
    shape = shape_of(example("deepseek-v3"))
    assert shape.mtp_layers == 1
    assert len(shape.layers) == 61
    assert [layer.kind for layer in shape.layers[:4]] == ["dense"] * 3 + ["experts"]


def test_a_window_limits_what_counts():
    mistral = {**SMOLLM2, "model_type": "mistral", "sliding_window": 512}
    full = {**mistral, "sliding_window": None}

    def scores(config, sequence, *, causal):
        products = priced(config, sequence=sequence, causal=causal)[1].products
        return next(p.forward_flops for p in products if p.name == "attention scores")

    assert scores(mistral, 512, causal=True) == scores(full, 512, causal=True)
    # Within a window w a token sees w of s tokens, and half of the first w fewer: w - w²/2s.
    assert scores(mistral, 2048, causal=True) == 2 * 2048 * 9 * 64 * (512 - 512 / 8)
    assert scores(mistral, 2048, causal=False) == 2 * 2048 * 9 * 64 * 512


def test_windows_in_every_second_layer():
    gemma = {**SMOLLM2, "model_type": "gemma2", "sliding_window": 128}
    layers = shape_of(gemma).layers
    assert [layer.attention.window for layer in layers[:4]] == [128, None, 128, None]
    told = {**gemma, "layer_types": ["full_attention"] * 30}
    assert {layer.attention.window for layer in shape_of(told).layers} == {None}


def test_splitting_shares_out_flops_and_parameters():
    config, s = example("qwen3-30b-a3b"), 4096
    whole = totals(priced(config, sequence=s))
    split = Split(tensor=2, sequence_parallel=True, context=2, expert=4, expert_tensor=1)
    pieces = priced(config, sequence=s, split=split)
    layer, alone = pieces[1], priced(config, sequence=s)[1]
    assert totals(pieces).forward_flops == pytest.approx(whole.forward_flops / 4)
    experts = sum(w.count for w in alone.weights if w.group == "expert")
    assert sum(w.count for w in layer.weights if w.group == "expert") == experts / 4
    norms = 2 * 2048 + 2 * 128
    router = 2048 * 128
    assert (
        layer.parameters
        == experts / 4 + norms + router + (alone.parameters - experts - norms - router) / 2
    )


def test_messages_of_tensor_and_sequence_parallelism():
    s, h = 4096, 4096
    size = 2 * s * h
    told = priced(example("llama3-8b"), split=Split(tensor=4))[1].collectives
    assert [(m.kind, m.action, m.bytes) for m in told] == [
        ("all_reduce", "I", size),
        ("all_reduce", "F", size),
    ] * 2
    both = priced(example("llama3-8b"), split=Split(tensor=4, sequence_parallel=True))[
        1
    ].collectives
    assert [(m.kind, m.action) for m in both[:5]] == [
        ("all_gather", "F"),
        ("reduce_scatter", "I"),
        ("all_gather", "W"),
        ("reduce_scatter", "F"),
        ("all_gather", "I"),
    ]
    assert {m.bytes for m in both} == {size}


def test_messages_of_context_and_expert_parallelism():
    context = priced(example("llama3-8b"), split=Split(context=4))[1].collectives
    assert {m.group for m in context} == {"context"}
    assert {m.bytes for m in context} == {2 * 2 * 4096 * 8 * 128}
    expert = priced(example("mixtral-8x7b"), split=Split(expert=4))[1].collectives
    assert [(m.kind, m.action) for m in expert] == [("all_to_all", action) for action in "FFII"]
    assert {m.bytes for m in expert} == {2 * 2 * 4096 * 4096}


def test_recomputation_is_hardware_flops_and_comes_back_for_a_while():
    config = example("llama3-8b")
    none, full = (priced(config, recompute=what) for what in (Recompute(), FULL))
    assert totals(full).model_flops == totals(none).model_flops
    layers = sum(piece.forward_flops for piece in none[1:-1])
    assert totals(full).hardware_flops == totals(none).model_flops + layers
    assert full[1].kept_bytes == 2 * 4096 * 4096
    assert full[1].rebuilt_bytes == none[1].kept_bytes
    assert full[1].held_bytes == none[1].held_bytes
    some = priced(config, recompute=Recompute(granularity="full", layers=3))
    assert [piece.rebuilt_bytes > 0 for piece in some[1:-1]] == [True] * 3 + [False] * 29
    assert {t.action for t in full[1].traffic} == {"F", "I", "W", "R"}
    split = Split(tensor=2, sequence_parallel=True)
    again = [m.action for m in priced(config, recompute=FULL, split=split)[1].collectives]
    assert again.count("R") == again.count("F") == 4


def test_full_recomputation_makes_mfu_three_quarters_of_hfu():
    # Narayanan et al. print HFU with full recomputation (FACTS, section 4); the head is not redone.
    whole = totals(priced(gpt(), sequence=2048, recompute=FULL)[1:-1])
    assert whole.model_flops / whole.hardware_flops == pytest.approx(0.75)


def selective(*modules):
    return Recompute().changed("selective", modules=modules)


DROPPED = {
    ("llama3-8b", "core_attn"): {"softmax statistics"},
    ("llama3-8b", "layernorm"): {"attention input", "mlp input"},
    ("llama3-8b", "mlp"): {"mlp gate", "mlp up", "mlp down input"},
    ("deepseek-v3", "mla_up_proj"): {
        *("queries", "keys", "values", "query latent", "key and value latent"),
    },
    ("deepseek-v3", "moe_act"): {"experts down input"},
    ("deepseek-v3", "shared_experts"): {
        *("shared expert gate", "shared expert up", "shared expert down input"),
    },
    ("deepseek-v3", "moe"): {
        *("router scores", "experts input", "experts gate", "experts up", "experts down input"),
        *("experts output", "shared expert gate", "shared expert up", "shared expert down input"),
    },
}


@pytest.mark.parametrize(("name", "module"), DROPPED)
def test_a_module_that_is_made_again_drops_its_own_tensors(name, module):
    config = example(name)
    plain, made = (priced(config, recompute=what)[-2] for what in (Recompute(), selective(module)))
    dropped = DROPPED[name, module]
    assert kept(plain).keys() - kept(made).keys() == dropped
    assert made.rebuilt_bytes == plain.kept_bytes - made.kept_bytes
    assert made.rebuilt_bytes == sum(kept(plain)[tensor] for tensor in dropped)
    assert made.held_bytes == plain.held_bytes
    assert made.weights == plain.weights


def test_a_module_that_is_made_again_repeats_its_own_forward():
    split = Split(tensor=8, sequence_parallel=True, expert=8, expert_tensor=1)

    def repeated(*modules):
        layer = priced(example("deepseek-v3"), split=split, recompute=selective(*modules))[-2]
        products = {p.name for p in layer.products if p.recomputed}
        moved = {t.name for t in layer.traffic if t.action == "R"}
        return products, moved, {m.name for m in layer.collectives if m.action == "R"}

    assert repeated("layernorm") == (set(), {"attention norm", "mlp norm"}, set())
    assert repeated("moe_act") == (set(), {"experts activation"}, set())
    products, moved, messages = repeated("mla_up_proj")
    assert products == {"query up", "key and value up"}
    assert moved == {"query norm", "key and value norm", "rotary positions"}
    assert messages == {"query up input", "key and value up input"}
    products, moved, messages = repeated("moe")
    assert products >= {"router", "experts gate and up", "experts down", "shared expert down"}
    assert {"tokens to experts", "tokens from experts", "shared expert down output"} <= messages
    assert {"permutation", "experts activation"} <= moved
    both = repeated("layernorm", "moe_act")
    assert both[1] == {"attention norm", "mlp norm", "experts activation"}


def test_what_a_module_is_made_again_from_stays_in_16_bits():
    fp8 = {"precision": Precision.named("fp8")}
    plain, made, norms = (
        kept(priced(example("llama3-8b"), recompute=what, **fp8)[1])
        for what in (Recompute(), selective("mlp"), selective("mlp", "layernorm"))
    )
    assert made["mlp input"] == 2 * plain["mlp input"]
    assert "mlp input" not in norms


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("mla_up_proj", "llama has no latent attention; leave it out"),
        ("moe", "llama has no experts"),
        ("moe_act", "llama has no experts"),
        ("shared_experts", "llama has no shared experts"),
    ],
)
def test_a_module_that_a_model_has_not_is_refused(module, said):
    with pytest.raises(ConfigError, match=f"--recompute-modules {module}: {said}"):
        priced(example("llama3-8b"), recompute=selective(module))


def test_what_is_held_between_the_halves_of_a_backward():
    layer = priced(example("llama3-8b"))[1]
    h, kv, f, s = 4096, 1024, 14336, 4096
    inputs = h + h + h + f  # of attention, of its output, of the MLP, of its last matrix
    gradients = (h + 2 * kv) + h + 2 * f + h
    assert layer.kept_until_weight_bytes == 2 * s * inputs
    assert layer.held_bytes == 2 * s * (inputs + gradients)


def test_of_what_is_held_only_gathered_gradients_are_whole_on_every_rank():
    config, h, s, t = example("llama3-8b"), 4096, 4096, 8
    whole = priced(config)[1]
    cut = priced(config, split=Split(tensor=t, sequence_parallel=True))[1]
    gathered = 2 * (2 * s * h)  # of the outputs of the projection and of the last matrix
    assert cut.held_bytes == (whole.held_bytes - gathered) / t + gathered


def test_copies_of_tokens_are_sorted_once_more_by_a_rank_of_several_experts():
    config = example("mixtral-8x7b")
    moved = {}
    for expert in (1, 4, 8):
        layer = priced(config, split=Split(expert=expert))[1]
        moved[expert] = sum(t.bytes for t in layer.traffic if t.name == "permutation")
    once = 2 * 2 * 2 * 2 * 4096 * 2 * 4096  # F and I, there and back, read and written, 16 bits
    assert moved == {1: once, 4: 2 * once, 8: once}


def test_in_8_bits_factors_are_gathered_in_8_and_the_head_is_in_16():
    split = Split(tensor=4, sequence_parallel=True)
    wide, narrow = (
        priced(example("llama3-8b"), split=split, precision=Precision.named(name))
        for name in ("bf16", "fp8")
    )
    for before, after in zip(wide[1].collectives, narrow[1].collectives, strict=True):
        assert before.bytes / after.bytes == (2 if after.kind == "all_gather" else 1)
    assert wide[-1].collectives == narrow[-1].collectives
    assert wide[-1].kept_bytes == narrow[-1].kept_bytes
    assert [product.wide for product in narrow[-1].products] == [True]
    assert not any(product.wide for product in narrow[1].products)


@pytest.mark.parametrize(
    ("precision", "sharding", "copies", "each"),
    [
        ("bf16", "no_shard", 8, 18),
        ("bf16", "optim", 8, 6 + 12 / 8),
        ("bf16", "optim_grads", 8, 2 + 16 / 8),
        ("bf16", "optim_grads_params", 8, 18 / 8),
        ("fp32", "no_shard", 1, 16),
        ("fp8", "no_shard", 1, 18),
        ("fp8_weights", "optim", 4, 5 + 12 / 4),
    ],
)
def test_bytes_of_a_parameter(precision, sharding, copies, each):
    found = states(1000, Precision.named(precision), sharding=sharding, copies=copies)
    assert found.bytes == 1000 * each


def test_experts_are_shared_out_over_fewer_copies():
    config = example("mixtral-8x7b")
    split = Split(expert=4)
    pieces = priced(config, split=split)
    found = states_of_pieces(
        pieces, Precision.named("bf16"), split, sharding="optim", data_parallel=8
    )
    experts = sum(w.count for piece in pieces for w in piece.weights if w.group == "expert")
    dense = parameters(pieces) - experts
    assert found.bytes == dense * (6 + 12 / 8) + experts * (6 + 12 / 2)
    with pytest.raises(ConfigError, match="does not divide the 2 ranks"):
        states_of_pieces(pieces, Precision.named("bf16"), split, sharding="optim", data_parallel=2)


def test_a_tied_head_counts_where_the_embedding_is_not():
    pieces = priced(SMOLLM2)
    matrix = 49152 * 576
    assert pieces[0].parameters == matrix
    assert parameters(pieces) == sum(p.parameters for p in pieces) - matrix
    assert parameters(pieces[-1:]) == matrix + 576


def test_fp8_keeps_inputs_of_products_in_a_byte():
    full, eight = (
        priced(example("llama3-8b"), precision=Precision.named(name))[1] for name in ("bf16", "fp8")
    )
    inputs = 4096 * (4096 * 3 + 14336)
    assert full.kept_until_weight_bytes == 2 * inputs
    assert eight.kept_until_weight_bytes == inputs
    # Flash attention keeps its own output, which the matrix behind it keeps in 8 bits.
    assert kept(eight)["attention output"] == 2 * 4096 * 4096


@pytest.mark.parametrize(
    ("split", "sequence", "message"),
    [
        (Split(tensor=3), 4096, "size 3 does not divide the 32 attention heads: use 2 or 4"),
        (Split(tensor=64), 4096, "size 64 does not divide the 32 attention heads: use 32"),
        (Split(tensor=0), 4096, "--tensor-model-parallel-size 0: it must be 1 or more"),
        (Split(sequence_parallel=True), 4096, "give that 2 or more"),
        (Split(), 10**400, "--seq-length 1000.*: it must be 1 to 1e.12"),
        (Split(context=3), 4096, "4096 is not divided by 6.*use 4092 or 4098"),
        (Split(expert=2), 4096, "llama has no experts; leave it out"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(split, sequence, message):
    with pytest.raises(ConfigError, match=message):
        priced(example("llama3-8b"), split=split, sequence=sequence)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="size 3 does not divide the 8 experts: use 2 or 4"):
        priced(example("mixtral-8x7b"), split=Split(expert=3))
    with pytest.raises(ConfigError, match=r"with .* 2 needs --sequence-parallel"):
        priced(example("mixtral-8x7b"), split=Split(expert=2, tensor=2))
    with pytest.raises(ConfigError, match=r"expert-tensor-parallel-size 1 with .* 4 needs --seq"):
        priced(example("mixtral-8x7b"), split=Split(expert_tensor=1, tensor=4))
    with pytest.raises(ConfigError, match=r"expert-tensor-parallel-size 4: llama has no experts"):
        priced(example("llama3-8b"), split=Split(expert_tensor=4))
    with pytest.raises(ConfigError, match="--recompute-num-layers needs"):
        priced(example("mixtral-8x7b"), recompute=Recompute(layers=3))


def test_more_tensor_parallel_ranks_than_groups_copy_keys_and_values():
    config = example("llama3-8b")
    eight, sixteen = (priced(config, split=Split(tensor=t))[1] for t in (8, 16))
    assert kept(eight)["keys"] == kept(sixteen)["keys"] == 2 * 4096 * 128
