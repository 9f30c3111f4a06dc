"""The roofline: units, limits, and that more work never takes less time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.cost.hardware import (
    Cluster,
    Layout,
    Overlap,
    Ring,
    Roofline,
    optimizer_s,
    preset,
    presets,
)
from fullbore.cost.hardware.assemble import stage_costs
from fullbore.cost.hardware.device import constants_of
from fullbore.cost.hardware.gemm import Gemm, gemm_s
from fullbore.cost.hardware.links import collective_s
from fullbore.cost.model import Collective, Kernels, Piece, Precision, Product, Traffic
from fullbore.errors import ConfigError

BF16 = Precision.named("bf16")
H100 = preset("h100")
HOPPER = constants_of("hopper")
HIDDEN = HOPPER.hidden_share
SIZES = st.integers(min_value=1, max_value=20_000)
DEVICES = st.sampled_from(presets())


def price(gemm: Gemm, name: str = "h100") -> float:
    device = preset(name)
    peak = device.peak_flop_per_s("bf16")
    return gemm_s(gemm, device, constants_of(device.generation), peak_flop_per_s=peak)


@given(DEVICES, SIZES, SIZES, SIZES, SIZES, st.sampled_from(["rows", "inner", "columns"]))
@settings(max_examples=150)
def test_a_larger_product_takes_no_less_time(name, rows, inner, columns, more, side):
    small = Gemm(rows=rows, inner=inner, columns=columns)
    large = replace(small, **{side: getattr(small, side) + more})
    assert price(large, name) >= price(small, name)


@given(DEVICES, SIZES, SIZES, SIZES, st.integers(min_value=1, max_value=64))
@settings(max_examples=150)
def test_no_product_is_faster_than_the_peak_or_the_memory(name, rows, inner, columns, count):
    gemm = Gemm(rows=rows, inner=inner, columns=columns, count=count)
    device = preset(name)
    assert price(gemm, name) >= 2.0 * rows * inner * columns * count / (
        device.peak_flop_per_s("bf16")
    )
    assert price(gemm, name) >= gemm.moved_bytes / device.memory_bytes_per_s


def test_a_large_product_reaches_its_share_and_a_small_one_does_not():
    large, small = (Gemm(rows=n, inner=n, columns=n) for n in (16384, 256))
    reached = [2 * g.rows**3 / price(g) / 989.4e12 for g in (large, small)]
    assert reached[0] == pytest.approx(HOPPER.product_share, rel=0.03)
    assert reached[1] < 0.1 * reached[0]


def test_an_empty_product_takes_no_time():
    assert price(Gemm(rows=0, inner=8, columns=8)) == 0.0


def test_one_column_too_many_costs_a_tile():
    whole = price(Gemm(rows=4096, inner=4096, columns=4096))
    over = price(Gemm(rows=4096, inner=4096, columns=4097))
    assert 1.03 < over / whole < 1.08  # 17 tiles of columns, not 16


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.floats(min_value=1, max_value=1e10),
    st.floats(min_value=1, max_value=4),
    st.integers(min_value=1, max_value=8),
    st.integers(min_value=1, max_value=64),
)
@settings(max_examples=150)
def test_more_bytes_take_more_time_and_beyond_the_node_no_less(kind, size, times, in_node, nodes):
    def seconds(size_bytes: float, ring: Ring) -> float:
        return collective_s(kind, size_bytes, ring, H100, HOPPER)

    wide = Ring(size=in_node * nodes, in_node=in_node)
    assert seconds(size * times, wide) >= seconds(size, wide)
    near = Ring(size=wide.size, in_node=wide.size)
    assert seconds(size, wide) >= seconds(size, near) * (1 - 1e-12)


def test_a_ring_moves_what_rings_move():
    ring = Ring(size=8, in_node=8)
    per_second = 450e9 * HOPPER.node_share
    reduced = collective_s("all_reduce", 8e9, ring, H100, HOPPER)
    gathered = collective_s("all_gather", 8e9, ring, H100, HOPPER)
    assert gathered == pytest.approx(7e9 / per_second, rel=1e-3)
    assert reduced == pytest.approx(2 * gathered)
    assert collective_s("all_reduce", 8e9, Ring(size=1, in_node=1), H100, HOPPER) == 0.0


def test_a_ring_over_whole_nodes_leaves_by_all_their_links():
    one, eight = Ring(size=8, in_node=1), Ring(size=64, in_node=8)
    alone, together = (collective_s("all_gather", 64e9, r, H100, HOPPER) for r in (one, eight))
    assert together < alone / 5


def layer(**given: object) -> Piece:
    products = (
        Product(name="first", rows=4096, inner=4096, columns=16384),
        Product(name="scores", rows=4096, inner=128, columns=4096, count=32, weight=False),
    )
    return Piece(kind="layer", index=3, products=products, **given)


def roofline(**given: object) -> Roofline:
    layout = Layout(cluster=Cluster.parse("h100:8"), tensor=8)
    return Roofline(layout=layout, precision=BF16, **given)


def test_backward_of_fused_attention_costs_more_and_weights_have_their_own():
    priced = roofline().priced(layer())
    flops = 2.0 * 4096 * 128 * 4096 * 32
    forward_s = flops / (989.4e12 * HOPPER.attention_share)
    assert priced.forward.attention_s == pytest.approx(forward_s, rel=0.05)
    assert priced.input_grad.attention_s > 2 * priced.forward.attention_s
    assert priced.weight_grad.attention_s == 0.0
    assert priced.recompute.total_s == 0.0
    assert priced.forward_s == priced.forward.total_s


def test_unfused_attention_moves_its_scores():
    fused = roofline().priced(layer()).forward
    unfused = roofline(kernels=Kernels(flash=False)).priced(layer()).forward
    assert unfused.attention_s == 0.0
    assert unfused.products_s > fused.products_s + 32 * 4096 * 4096 * 2 / 3.35e12


def test_traffic_is_bytes_over_bandwidth():
    moved = Traffic(name="norm", read_bytes=1e9, written_bytes=1e9)
    priced = roofline().priced(layer(traffic=(moved,)))
    assert priced.forward.traffic_s == pytest.approx(
        2e9 / (3.35e12 * HOPPER.traffic_share) + HOPPER.kernel_s
    )
    assert priced.input_grad.traffic_s == 0.0


def message(action: str, kind: str = "reduce_scatter") -> Collective:
    return Collective(name="m", kind=kind, bytes=1e8, group="tensor", action=action)


def test_messages_are_exposed_but_for_what_computation_hides():
    both = (message("F"), message("I"))
    usual = roofline().priced(layer(collectives=both))
    assert usual.forward.exposed_s > usual.input_grad.exposed_s > 0
    share = 1 - HOPPER.hidden_share
    assert usual.input_grad.exposed_s == pytest.approx(share * usual.forward.exposed_s)
    hidden = roofline(overlap=Overlap(forward=True)).priced(layer(collectives=both))
    in_pieces = pytest.approx(usual.forward.exposed_s / 8)  # of 8, one has nothing beside it
    assert hidden.forward.exposed_s == hidden.input_grad.exposed_s == in_pieces


def test_tokens_on_their_way_to_experts_are_waited_for_unless_another_microbatch_computes():
    told = ("F", "I")
    one = layer(
        collectives=tuple(
            Collective(name="m", kind="all_to_all", bytes=4e7, group="expert", action=action)
            for action in told
        )
    )
    layout = Layout(cluster=Cluster.parse("h100:8"), data=8, expert=8)
    whole_s = layout.collective_s("all_to_all", 4e7, "expert")
    assert whole_s > 0
    for overlap, left in ((Overlap(forward=True), 1.0), (Overlap(expert=True), 1 - HIDDEN)):
        made = Roofline(layout=layout, precision=BF16, overlap=overlap).priced(one)
        for seconds in (made.forward, made.input_grad):
            assert seconds.exposed_s == pytest.approx(left * whole_s)


@pytest.mark.parametrize(("context", "node"), [(2, True), (4, True), (8, True), (4, False)])
def test_keys_and_values_go_round_beside_attention(context, node):
    """Ring attention by hand: C steps of attention, a part on its way during each but the last."""
    cluster = Cluster.parse("h100:1x8" if node else "h100:8x8")
    layout = Layout(cluster=cluster, context=context, tensor=1 if node else 8)
    per_s = 450e9 * HOPPER.node_share if node else 50e9 * HOPPER.network_share
    line = Roofline(layout=layout, precision=BF16)
    for size in (1e6, 1e8, 1e9):
        told = (("all_gather", "F"), ("all_gather", "I"), ("reduce_scatter", "I"))
        priced = line.priced(
            layer(
                collectives=tuple(
                    Collective(name="kv", kind=kind, bytes=size, group="context", action=action)
                    for kind, action in told
                )
            )
        )
        part_s = size / context / per_s + HOPPER.hop_s
        once_s = priced.forward.attention_s / context
        waited_s = sum(max(0.0, part_s - once_s) for _ in range(context - 1))
        assert priced.forward.exposed_s == pytest.approx(waited_s)
        once_s = priced.input_grad.attention_s / context
        waited_s = sum(max(0.0, 2 * part_s - once_s) for _ in range(context - 1)) + part_s
        assert priced.input_grad.exposed_s == pytest.approx(waited_s)
    assert line.priced(layer()).input_grad.exposed_s == 0.0


def test_a_product_waits_for_what_it_reads():
    gathered = roofline().priced(layer(collectives=(message("I", "all_gather"),)))
    scattered = roofline().priced(layer(collectives=(message("I"),)))
    assert gathered.input_grad.exposed_s > scattered.input_grad.exposed_s


def test_eight_bits_are_faster_but_for_casts():
    wide = Product(name="w", rows=8192, inner=8192, columns=32768)
    thin = Product(name="t", rows=8192, inner=8192, columns=128)
    for product, faster in ((wide, True), (thin, False)):
        piece = Piece(kind="layer", index=0, products=(product,))
        layout = Layout(cluster=Cluster.parse("h100:8"))
        seconds = [
            Roofline(layout=layout, precision=Precision.named(name)).priced(piece).forward_s
            for name in ("fp8", "bf16")
        ]
        assert (seconds[0] < seconds[1]) is faster


def test_what_is_wide_takes_in_8_bits_what_it_takes_in_16():
    wide = Product(name="head", rows=4096, inner=4096, columns=32768, wide=True)
    piece = Piece(kind="head", index=0, products=(wide,))
    layout = Layout(cluster=Cluster.parse("h100:8"))
    narrow, usual = (
        Roofline(layout=layout, precision=Precision.named(name)).priced(piece)
        for name in ("fp8", "bf16")
    )
    assert narrow == usual


def test_a_device_without_the_precision_is_an_error():
    layout = Layout(cluster=Cluster.parse("a100:8"))
    with pytest.raises(ConfigError, match="has no fp8 peak"):
        Roofline(layout=layout, precision=Precision.named("fp8")).priced(layer())


def test_stages_are_sums_of_their_pieces():
    line = Roofline(layout=Layout(cluster=Cluster.parse("h100:8"), pipeline=2), precision=BF16)
    one = layer()
    costs = stage_costs(line, [[one], [one, replace(one, index=4)]], message_bytes=1e6)
    assert costs.stages[1].forward_s == pytest.approx(2 * costs.stages[0].forward_s)
    assert costs.stages[0].backward_s == pytest.approx(
        line.priced(one).input_grad_s + line.priced(one).weight_grad_s
    )
    assert costs.hop_s == HOPPER.hop_s
    assert costs.message_bytes == 1e6


def test_an_optimizer_moves_what_it_reads_and_writes():
    layout = Layout(cluster=Cluster.parse("h100:8x8"), tensor=8, data=8)
    step = optimizer_s(layout, BF16, parameters=1e9)
    assert step == pytest.approx(1e9 * 38 / (3.35e12 * HOPPER.memory_share))
    assert optimizer_s(layout, BF16, parameters=1e9, shards=8) == pytest.approx(step / 8)
