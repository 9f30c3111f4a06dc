"""Kernels that the host starts: counted by module and action, replayed where a graph has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from priced import SMOLLM2, example, priced

from fullbore.cost.hardware import Capture, Cluster, Layout, Roofline
from fullbore.cost.hardware.device import constants_of
from fullbore.cost.hardware.links import Ring, all_to_all_s
from fullbore.cost.model import Kernels, Piece, Precision, Recompute, Split
from fullbore.errors import ConfigError

FP8, BF16 = Precision.named("fp8"), Precision.named("bf16")
HOPPER = constants_of("hopper")
LAYOUT = Layout(cluster=Cluster.parse("h100:8"), data=8, expert=8)


def counts(piece: Piece) -> dict[tuple[str, str], tuple[int, int]]:
    return {(one.module, one.action): (one.kernels, one.casts) for one in piece.launches}


def mixture(**changes: object) -> Piece:
    given = {"split": Split(expert=8, expert_tensor=1), "precision": FP8} | changes
    return priced(example("qwen3-30b-a3b"), **given)[1]


def test_a_dense_layer_is_counted_by_hand():
    # F: norm, product, rotation, attention, product, sum; norm, product, activation, product, sum.
    found = counts(priced(SMOLLM2)[1])
    assert found[("attn", "F")] == (6, 0)
    assert found[("mlp", "F")] == (5, 0)
    assert found[("attn", "W")] == found[("mlp", "W")] == (2, 0)
    assert found[("attn", "I")] == (8, 0)  # three for attention
    assert ("attn", "R") not in found


def test_in_eight_bits_each_factor_is_cast_and_experts_have_products_of_their_own():
    found = counts(mixture())
    assert found[("moe", "F")][1] == found[("moe", "I")][1] == 2 * 16  # of 128 experts on 8 ranks
    assert found[("moe", "W")] == (2 * 16, 0)
    assert found[("moe_router", "F")][1] == 0  # in 16 bits
    assert found[("attn", "F")][1] == 2
    assert counts(mixture(precision=BF16))[("moe", "F")][1] == 0
    again = counts(mixture(recompute=Recompute(granularity="full")))
    assert again[("moe", "R")] == again[("moe", "F")]


def test_sent_once_tokens_take_fewer_kernels():
    once = counts(mixture(kernels=Kernels(dispatcher="flex")))
    each = counts(mixture())
    assert once[("moe", "F")][0] < each[("moe", "F")][0]
    assert once[("moe_preprocess", "F")][0] < each[("moe_preprocess", "F")][0]


def roofline(**given: object) -> Roofline:
    return Roofline(layout=LAYOUT, **({"precision": FP8} | given))


def small(**changes: object) -> Piece:
    """Of 64 tokens, so that nothing on the device takes as long as its launch."""
    return mixture(sequence=64, **changes)


def test_an_action_takes_as_long_as_the_host_starts_its_kernels():
    kernels = sum(
        one.kernels + HOPPER.cast_kernels * one.casts
        for one in small().launches
        if one.action == "W"
    )
    price = roofline().priced(small()).weight_grad
    assert price.device_s < price.total_s == pytest.approx(kernels * HOPPER.launch_s)
    assert price.waited_s == pytest.approx(price.total_s - price.device_s)


def test_what_a_graph_replays_waits_for_nobody():
    whole = roofline(capture=Capture(implementation="full_iteration")).priced(small())
    assert whole.forward.waited_s == whole.input_grad.waited_s == whole.weight_grad.waited_s == 0.0
    some = Capture(implementation="transformer_engine", modules=("attn", "moe_router"))
    part, none = (roofline(capture=one).priced(small()) for one in (some, Capture()))
    assert 0.0 < part.forward.waited_s < none.forward.waited_s
    assert part.forward.device_s == none.forward.device_s == whole.forward.device_s


def test_a_host_that_waits_for_counts_of_tokens_starts_nothing_ahead():
    big = mixture(sequence=9216)
    waits = roofline(kernels=Kernels()).priced(big).forward
    ahead = roofline(kernels=Kernels(dropless=False)).priced(big).forward
    assert waits.device_s == ahead.device_s
    assert waits.waited_s > 0.0 == ahead.waited_s


def test_a_module_made_again_waits_for_counts_only_where_they_are_made_again():
    again = Recompute(granularity="selective", modules=("moe_act",))
    act, whole = small(recompute=again), small(recompute=replace(again, modules=("moe",)))
    assert set(counts(act)) - set(counts(small())) == {("moe", "R")}
    assert counts(whole)[("moe_preprocess", "R")] == counts(whole)[("moe_preprocess", "F")]
    assert counts(whole)[("moe", "R")][1] == counts(whole)[("moe", "F")][1] > 0  # casts
    assert ("attn", "R") not in counts(whole)
    price = roofline().priced(act).recompute
    host_s = counts(act)[("moe", "R")][0] * HOPPER.launch_s
    assert price.total_s == max(host_s, price.device_s)
    assert roofline().priced(whole).recompute.waited_s > 0.0


def test_large_work_does_not_wait_for_the_host():
    layer = priced(example("llama3-8b"), sequence=8192, precision=FP8)[1]
    for seconds in (roofline().priced(layer).forward, roofline().priced(layer).input_grad):
        assert seconds.waited_s == 0.0


def test_copies_of_a_token_go_once_to_each_node_and_rank():
    device = LAYOUT.cluster.device
    one, wide = Ring(size=8, in_node=8), Ring(size=64, in_node=8)
    for ring in (one, wide):
        each, once = (all_to_all_s(1e9, ring, device, HOPPER, copies=copies) for copies in (1, 8))
        assert once < each
    # Of 8 copies at random over 8 nodes, 8 (1 - (7/8)^8) = 5.25 reach one, 7/8 of them another one.
    seconds = all_to_all_s(8e9, wide, device, HOPPER, copies=8)
    sent = 1e9 * 5.2509 * 7 / 8
    assert seconds == pytest.approx(sent / (50e9 * HOPPER.network_share), rel=1e-3)


def test_what_is_gathered_is_cast_by_each_rank_for_itself():
    product = next(p for p in priced(example("llama3-8b"), split=Split(tensor=8))[1].products)
    cut = priced(example("llama3-8b"), split=Split(tensor=8, sequence_parallel=True))[1]
    assert product.gathered is None
    assert {p.name: (p.gathered, p.parts) for p in cut.products if p.weight} == {
        "attention query, key, value": ("input", 8),
        "attention projection": ("output", 8),
        "mlp gate and up": ("input", 8),
        "mlp down": ("output", 8),
    }
    alone = replace(product, gathered="input", parts=8)
    layout = Layout(cluster=Cluster.parse("h100:8"), tensor=8)
    seconds = [
        Roofline(layout=layout, precision=FP8)
        .priced(Piece(kind="layer", index=0, products=(one,)))
        .forward_s
        for one in (product, alone)
    ]
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize(
    ("implementation", "modules", "said"),
    [
        ("graph", None, "--cuda-graph-impl graph: it must be none, local"),
        ("local", "attn,dense", "--cuda-graph-modules dense: it must be some of attn, mlp"),
        ("none", "attn", "--cuda-graph-modules needs --cuda-graph-impl local or"),
        ("full_iteration", "attn", "full_iteration captures everything"),
    ],
)
def test_graphs_that_there_are_not_are_refused(implementation, modules, said):
    with pytest.raises(ConfigError, match=said):
        Capture.parse(implementation, modules)


def test_a_graph_of_layers_has_no_ends_and_moe_is_all_of_a_mixture():
    whole = Capture.parse("local", None)
    assert whole.has("attn")
    assert whole.has("moe")
    assert not whole.has("end")
    assert Capture.parse("local", "moe").has("moe_router")
    assert not Capture.parse("local", "moe_router").has("moe")
