"""Clusters: presets and their sources, names and files, and who shares a node with whom."""

from __future__ import annotations

import tomllib
from itertools import product
from pathlib import Path

import pytest

from fullbore.cost.hardware import Cluster, Layout, preset, preset_in, presets
from fullbore.cost.hardware.device import Device, constants_of
from fullbore.errors import ConfigError

FIGURES = {
    name
    for name, field in Device.model_fields.items()
    if name not in ("title", "generation", "unofficial", "sources")
}


@pytest.mark.parametrize("name", presets())
def test_each_figure_of_a_preset_has_a_source(name):
    device = preset(name)
    given = {figure for figure in FIGURES if getattr(device, figure) is not None}
    assert set(device.sources) == given
    assert constants_of(device.generation).product_share < 1


def test_presets_have_the_dense_peaks_of_the_facts():
    dense = {name: preset(name).peak_flop_per_s("bf16") / 1e12 for name in presets()}
    assert dense == {
        "910b": 320.0,
        "a100": 312.0,
        "b200": 2250.0,
        "gb200": 2500.0,
        "h100": 989.4,
        "h200": 989.4,
        "mi300x": 1307.4,
    }
    assert preset("h100").memory_bytes == 80 * 2**30
    assert preset("a100").memory_bytes_per_s == 2.039e12


def test_only_what_no_vendor_prints_is_unofficial():
    assert preset("h100").unofficial == ()
    assert "bf16_tflop_per_s" in preset("910b").unofficial


def test_a_precision_that_a_device_lacks_is_an_error():
    with pytest.raises(ConfigError, match=r"A100.* has no fp8 peak; it has bf16, fp16"):
        preset("a100").peak_flop_per_s("fp8")


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 NVL", None),
    ],
)
def test_a_driver_s_name_finds_its_preset(told, name):
    assert preset_in(told) == name


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("h100:8x8", 8, 8),
        ("h100:64", 8, 8),
        ("H100:4", 1, 4),
        ("h100", 1, 8),
        ("gb200:144", 2, 72),
        ("a100:3x5", 3, 5),
    ],
)
def test_names_of_clusters(text, nodes, per_node):
    cluster = Cluster.parse(text)
    assert (cluster.nodes, cluster.device.gpus_per_node) == (nodes, per_node)
    assert cluster.size == nodes * per_node


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h10:8", "no device is called 'h10'; known are 910b, a100"),
        ("h100:12", "12 devices are no whole number of nodes of 8; write 8 or 16"),
        ("h100:0", "'0' is no number of devices"),
        ("h100:8x", "'8x' is no number of devices; write a device and its number"),
        ("h100:8x8x8", "'8x8x8' is no number of devices"),
        ("h100:-8", "'-8' is no number"),
        ("h100:" + "9" * 5000, "is no number of devices"),
        ("h100:99999x99999", "99999 nodes of 99999 devices are more than 1000000: write fewer"),
        ("a" * 5000, "no device is called 'aaa"),
        ("", "no device is called ''"),
        ("nothing.toml", "cannot read a cluster from nothing.toml"),
    ],
)
def test_nonsense_is_told(text, said):
    with pytest.raises(ConfigError) as caught:
        Cluster.parse(text)
    assert said in str(caught.value)


def write(folder: Path, text: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_starts_from_a_preset(tmp_path):
    path = write(
        tmp_path, 'base = "h100"\nnodes = 4\nnetwork_gb_per_s = 25\n[constants]\nhop_s = 2e-5\n'
    )
    cluster = Cluster.parse(path)
    assert (cluster.nodes, cluster.size) == (4, 32)
    assert cluster.device.network_bytes_per_s == 25e9
    assert cluster.device.node_bytes_per_s == 450e9
    assert "network_gb_per_s" not in cluster.device.sources
    assert cluster.constants.hop_s == 2e-5
    assert cluster.constants.product_share == constants_of("hopper").product_share


def test_a_file_s_own_size_can_be_changed(tmp_path):
    path = write(tmp_path, 'base = "h100"\n')
    assert Cluster.parse(f"{path}:2x4").size == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('base = "h10"', "base: 'h10' is no preset; known are 910b"),
        ('base = "h100"\nnodes = 0', "nodes: 0 is no number of nodes; write 1 or more"),
        ('base = "h100"\nmemory_gb = 80', "memory_gb: unknown; known are title"),
        ('base = "h100"\nmemory_gib = -1', "memory_gib: Input should be greater than 0"),
        ('base = "h100"\ngeneration = "volta"', "generation: no constants are known for 'volta'"),
        ('base = "h100"\n[constants]\nhop = 1', "constants: hop: unknown; known are product_share"),
        ('base = "h100"\n[constants]\nnode_share = 2', "constants: node_share: Input should be"),
        ('base = "h100"\n[constants]\nnode_share = 1e-320', "or equal to 0.000001"),
        ('base = "h100"\nconstants = 3', "constants: write them as a table"),
        ('base = "h100"\nunofficial = ["fp4"]', "unofficial names fp4, which is no figure"),
        ('title = "x"', 'generation: missing; give it, or start from a preset with base = "h100"'),
        ("base = ", "cannot read a cluster from"),
    ],
)
def test_a_file_s_mistakes_are_named(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        Cluster.load(write(tmp_path, text))
    assert said in str(caught.value)


def test_every_file_of_data_is_a_table_of_known_keys():
    import fullbore.cost.hardware as package

    folder = Path(package.__file__).parent
    for file in [*folder.glob("presets/*.toml"), *folder.glob("constants/*.toml")]:
        assert tomllib.loads(file.read_text(encoding="utf-8")), file.name


def groups(layout: Layout, group: str) -> list[set[int]]:
    """The ranks of each group, by Megatron's order spelled out."""
    made: dict[tuple[int, ...], set[int]] = {}
    sizes = (layout.pipeline, layout.data, layout.context, layout.tensor)
    for p, d, c, t in product(*map(range, sizes)):
        rank = t + layout.tensor * (c + layout.context * (d + layout.data * p))
        key = {
            "tensor": (p, d, c),
            "context": (p, d, t),
            "data": (p, c, t),
            "gradient": (p, t),
        }[group]
        made.setdefault(key, set()).add(rank)
    return list(made.values())


SIZES = [
    (1, 1, 64, 1),
    (8, 1, 8, 1),
    (8, 1, 1, 8),
    (4, 1, 2, 8),
    (2, 2, 4, 4),
    (1, 4, 4, 4),
    (16, 1, 2, 2),
    (2, 1, 16, 2),
    (6, 1, 5, 2),
    (3, 1, 20, 1),
    (3, 4, 5, 1),
    (5, 1, 4, 3),
    (12, 1, 5, 1),
]


@pytest.mark.parametrize("group", ["tensor", "context", "data", "gradient"])
@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_of_a_group_that_share_a_node(sizes, group):
    tensor, context, data, pipeline = sizes
    layout = Layout(
        cluster=Cluster.parse("h100:64"),
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
    )
    ring, fewest = layout.ring(group), []
    for members in groups(layout, group):
        nodes = [sum(rank // 8 == node for rank in members) for node in range(8)]
        assert ring.size == len(members)
        fewest.append(min(count for count in nodes if count))
    assert ring.in_node == min(fewest)


def test_a_group_that_nodes_cut_through_is_not_taken_for_one_within_a_node():
    layout = Layout(cluster=Cluster.parse("h100:6x8"), tensor=6, data=8)
    assert layout.ring("tensor").in_node == 2  # ranks 6 and 7 are on another node than 8 to 11
    whole = Layout(cluster=Cluster.parse("h100:6x8"), tensor=4, data=12)
    assert layout.collective_s("all_reduce", 1e9, "tensor") > 4 * whole.collective_s(
        "all_reduce", 1e9, "tensor"
    )


def test_experts_are_spread_over_neighbours():
    cluster = Cluster.parse("h100:8x8")
    layout = Layout(cluster=cluster, tensor=2, data=8, expert=8, expert_tensor=1, pipeline=4)
    assert layout.ring("expert").in_node == 8
    assert layout.ring("expert_gradient").size == 2
    wide = Layout(cluster=cluster, tensor=2, data=32, expert=16)
    assert (wide.ring("expert").size, wide.ring("expert").in_node) == (16, 4)


def test_hops_within_and_between_nodes():
    cluster = Cluster.parse("h100:8x8")
    within = Layout(cluster=Cluster.parse("h100:8"), pipeline=8)
    between = Layout(cluster=cluster, tensor=8, pipeline=8)
    assert not within.hops_leave
    assert between.hops_leave
    assert between.hop_bytes_per_s == pytest.approx(50e9 * cluster.constants.network_share)
    assert within.hop_bytes_per_s == pytest.approx(450e9 * cluster.constants.message_share)


def test_one_pair_of_a_mesh_has_one_link():
    layout = Layout(cluster=Cluster.parse("mi300x:8"), pipeline=8)
    assert layout.hop_bytes_per_s <= 64e9


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tensor": 0}, "tensor parallel size 0: it must be 1 or more"),
        ({"expert_tensor": 0}, "expert tensor parallel size 0: it must be 1 or more"),
        ({"data": 65}, "are 65 ranks; h100:8x8 has 64 devices"),
        ({"data": 8, "expert": 3}, "expert parallel size 3 x 1 does not divide the 8 ranks"),
    ],
)
def test_jobs_that_do_not_fit_are_refused(sizes, said):
    with pytest.raises(ConfigError, match=said):
        Layout(cluster=Cluster.parse("h100:8x8"), **sizes)
