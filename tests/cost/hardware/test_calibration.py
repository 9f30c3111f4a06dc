"""Calibration: constants are found again from times that they made, and files are read back."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from fullbore.cost.hardware import Cluster, preset
from fullbore.cost.hardware.calibration import (
    Measured,
    MeasuredProduct,
    calibrated,
    errors_of,
    to_toml,
)
from fullbore.cost.hardware.device import constants_of
from fullbore.cost.hardware.gemm import Gemm, gemm_s

SHAPES = [(n, k, n) for n in (256, 512, 1024, 4096) for k in (256, 1024, 8192)]


def timed(
    name: str, changes: dict[str, float] | None = None, *, noise: float = 0.0
) -> tuple[MeasuredProduct, ...]:
    """Products as a preset's device with changed constants takes for them, off by `noise`."""
    device = preset(name)
    constants = constants_of(device.generation).model_copy(update=changes or {})
    peak = device.peak_flop_per_s("bf16")
    return tuple(
        MeasuredProduct(
            rows=rows,
            inner=inner,
            columns=columns,
            seconds=gemm_s(
                Gemm(rows=rows, inner=inner, columns=columns),
                device,
                constants,
                peak_flop_per_s=peak,
            )
            * (1 + noise * (-1) ** index),
        )
        for index, (rows, inner, columns) in enumerate(SHAPES)
    )


def gpu(**changes: object) -> Measured:
    return replace(
        Measured(
            device="NVIDIA H100 80GB HBM3",
            is_gpu=True,
            precision="bf16",
            element_bytes=2.0,
            multiprocessors=132,
            ranks=8,
            ranks_per_node=8,
            memory_bytes=79.6 * 2**30,
            products=timed("h100", {"product_share": 0.70, "kernel_s": 5e-6}),
            peaks={"bf16": 6.6e14},
            copy_bytes_per_s=2.7e12,
            host_bytes_per_s=5e10,
            hop_s=8e-6,
            pair_bytes_per_s=1.1e11,
            reduced_bytes=6.4e7,
            all_reduce_s=3.2e-4,
            small_all_reduce_s=4e-5,
        ),
        **changes,
    )


def cpu(**changes: object) -> Measured:
    """Two ranks of one thread each, 50 GFLOP/s for all but small products."""
    products = tuple(
        MeasuredProduct(rows=n, inner=n, columns=n, seconds=2 * n**3 / 5e10 + 4e-6)
        for n in (32, 64, 128, 256, 512)
    )
    return replace(
        gpu(),
        device='CPU "x86_64"',
        is_gpu=False,
        precision="fp32",
        element_bytes=4.0,
        multiprocessors=1,
        ranks=2,
        ranks_per_node=2,
        products=products,
        peaks={"fp32": 5e10},
        copy_bytes_per_s=1e10,
        host_bytes_per_s=5e9,
        hop_s=5e-5,
        pair_bytes_per_s=1e9,
        all_reduce_s=0.1,
        **changes,
    )


def test_constants_of_products_are_found_again():
    found = calibrated(gpu())
    assert found.base == "h100"
    errors = [abs(error) for error in errors_of(gpu(), found)]
    assert max(errors) < 0.04
    assert sum(errors) / len(errors) < 0.01
    large = Gemm(rows=8192, inner=8192, columns=8192)
    expected = constants_of("hopper").model_copy(update={"product_share": 0.70, "kernel_s": 5e-6})
    made, given = (
        gemm_s(large, preset("h100"), each, peak_flop_per_s=989.4e12)
        for each in (found.constants, expected)
    )
    assert made == pytest.approx(given, rel=0.03)


def test_noise_of_five_percent_stays_five_percent():
    measured = gpu(products=timed("h100", {"product_share": 0.70}, noise=0.05))
    errors = [abs(error) for error in errors_of(measured, calibrated(measured))]
    assert sum(errors) / len(errors) < 0.06


def test_messages_become_shares_of_the_data_sheet():
    constants = calibrated(gpu()).constants
    assert constants.memory_share == pytest.approx(2.7 / 3.35)
    assert constants.node_share == pytest.approx(2 * 7 / 8 * 6.4e7 / 3.2e-4 / 450e9)
    assert constants.message_share == pytest.approx(110 / 450)
    assert constants.hop_s == 8e-6
    assert constants.collective_s == 2e-5


def test_what_was_not_measured_stays_as_it_was():
    alone = gpu(
        ranks=1,
        ranks_per_node=1,
        **dict.fromkeys(
            ("hop_s", "pair_bytes_per_s", "reduced_bytes", "all_reduce_s", "small_all_reduce_s")
        ),
    )
    constants, known = calibrated(alone).constants, constants_of("hopper")
    assert (constants.node_share, constants.hop_s) == (known.node_share, known.hop_s)
    assert constants.message_share == known.message_share


@pytest.mark.parametrize("measured", [gpu(), cpu(), gpu(ranks=16)], ids=["gpu", "cpu", "two"])
def test_the_file_is_read_back_as_the_same_cluster(tmp_path, measured):
    found = calibrated(measured)
    path = tmp_path / "here.toml"
    path.write_text(to_toml(found, ["a note"]), encoding="utf-8")
    cluster = Cluster.parse(str(path))
    assert cluster.size == measured.ranks
    assert cluster.device.gpus_per_node == measured.ranks_per_node
    for name, value in found.constants.model_dump().items():
        assert getattr(cluster.constants, name) == pytest.approx(value, rel=1e-5), name


def test_another_device_has_what_was_seen_as_its_peak():
    found = calibrated(cpu())
    assert found.base is None
    assert found.device.peak_flop_per_s("fp32") == 5e10
    assert found.device.memory_bytes_per_s == 1e10
    assert max(map(abs, errors_of(cpu(), found))) < 0.15


def test_what_ranks_tell_each_other_survives_json():
    assert Measured.parse(asdict(gpu())) == gpu()


def test_a_card_with_other_memory_keeps_its_own(tmp_path):
    found = calibrated(gpu(device="NVIDIA A100-SXM4-40GB", memory_bytes=39.5 * 2**30))
    path = tmp_path / "here.toml"
    path.write_text(to_toml(found), encoding="utf-8")
    assert found.base == "a100"
    assert Cluster.parse(str(path)).device.memory_gib == pytest.approx(39.5)
    assert calibrated(gpu()).device.memory_gib == 80.0


def test_a_card_that_is_slower_than_its_namesake_is_measured():
    assert calibrated(gpu(device="NVIDIA H100 PCIe")).base is None


def test_a_precision_that_the_sheet_lacks_has_what_was_seen(tmp_path):
    found = calibrated(gpu(precision="fp32", element_bytes=4.0, peaks={"fp32": 5e13}))
    path = tmp_path / "here.toml"
    path.write_text(to_toml(found), encoding="utf-8")
    device = Cluster.parse(str(path)).device
    assert device.peak_flop_per_s("fp32") == 5e13
    assert device.peak_flop_per_s("bf16") == preset("h100").peak_flop_per_s("bf16")
