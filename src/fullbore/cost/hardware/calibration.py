"""From what was measured on a machine to a cluster file: peaks, and the constants that fit.

Products are fitted with the formula that predicts them (`gemm`): the peak is the best that was
seen, and what small and thin products lose becomes `tail_waves`, `inner_lost` and `kernel_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullbore.cost.hardware.device import GIB, Constants, Device, constants_of, preset, preset_in
from fullbore.cost.hardware.gemm import Gemm, gemm_s

__all__ = ["Calibrated", "Measured", "MeasuredProduct", "calibrated", "errors_of", "to_toml"]

_CPU_TILE = 16  # rows and columns: what a core's registers hold of an output, about
_FACTORS = (2.0, 0.5, 1.25, 0.8, 1.05, 0.952, 1.01, 0.99)
_ROUNDS = 100
_SAME_MEMORY = 0.05  # drivers keep some for themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProduct:
    """Seconds of one product [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int
    seconds: float

    @property
    def flop_per_s(self) -> float:
        """2·rows·inner·columns over the seconds."""
        return 2.0 * self.rows * self.inner * self.columns / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What `fullbore calibrate` found; None where there was nothing to measure it with.

    device: its name. precision, element_bytes: of the products. peaks: best FLOP/s by precision.
    memory_bytes: of one rank. copy_bytes_per_s: read and written bytes together. host_bytes_per_s:
    one way. hop_s, pair_bytes_per_s: a message to another rank of the machine; network_*: to one
    of another machine. all_reduce_s, reduced_bytes, small_all_reduce_s: over the machine's ranks.
    """

    device: str
    is_gpu: bool
    precision: str
    element_bytes: float
    multiprocessors: int
    ranks: int
    ranks_per_node: int
    memory_bytes: float
    products: tuple[MeasuredProduct, ...]
    peaks: Mapping[str, float]
    copy_bytes_per_s: float
    host_bytes_per_s: float
    hop_s: float | None = None
    pair_bytes_per_s: float | None = None
    network_hop_s: float | None = None
    network_bytes_per_s: float | None = None
    reduced_bytes: float | None = None
    all_reduce_s: float | None = None
    small_all_reduce_s: float | None = None

    @staticmethod
    def parse(data: Mapping[str, Any]) -> Measured:
        """From JSON of `asdict`."""
        products = tuple(MeasuredProduct(**product) for product in data["products"])
        return Measured(**{**data, "products": products})


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A device and constants that predict what was measured. base: the preset it is known as."""

    device: Device
    constants: Constants
    base: str | None
    nodes: int


def calibrated(measured: Measured) -> Calibrated:
    """The device and the constants that come nearest to what was measured.

    A GPU that a preset knows keeps its data sheet, and the constants say what is reached of it;
    any other device, and a precision that the sheet lacks, has as peak the best that was seen.
    """
    base = preset_in(measured.device) if measured.is_gpu else None
    device = _device(measured, base)
    constants = _constants(measured, device, base)
    nodes = max(1, measured.ranks // measured.ranks_per_node)
    return Calibrated(
        device=device, constants=_fitted(measured, device, constants), base=base, nodes=nodes
    )


def errors_of(measured: Measured, found: Calibrated) -> tuple[float, ...]:
    """predicted / measured - 1 of each product."""
    return _errors(measured, found.device, found.constants)


def _device(measured: Measured, base: str | None) -> Device:
    peaks = {f"{name}_tflop_per_s": peak / 1e12 for name, peak in measured.peaks.items()}
    memory_gib = measured.memory_bytes / GIB
    if base is not None:
        sheet = preset(base)
        own: dict[str, object] = {"gpus_per_node": measured.ranks_per_node}
        own |= {name: peak for name, peak in peaks.items() if getattr(sheet, name) is None}
        if abs(memory_gib / sheet.memory_gib - 1) > _SAME_MEMORY:
            own["memory_gib"] = memory_gib  # a smaller or larger one of the same name
        return sheet.model_copy(update=own)
    pair = measured.pair_bytes_per_s or measured.copy_bytes_per_s
    figures = {
        "title": measured.device,
        "generation": "measured",
        "multiprocessors": measured.multiprocessors,
        "memory_gib": memory_gib,
        "memory_gb_per_s": measured.copy_bytes_per_s / 1e9,
        "gpus_per_node": measured.ranks_per_node,
        "node_gb_per_s": pair / 1e9,
        "network_gb_per_s": (measured.network_bytes_per_s or pair) / 1e9,
        "host_gb_per_s": measured.host_bytes_per_s / 1e9,
    }
    return Device.model_validate({**figures, **peaks})


def _constants(measured: Measured, device: Device, base: str | None) -> Constants:
    """Constants before products are fitted: shares of what the device was given as its peaks."""
    known = constants_of(device.generation if base is not None else "hopper")
    tile = {} if measured.is_gpu else {"tile_rows": _CPU_TILE, "tile_columns": _CPU_TILE}
    best = max(product.flop_per_s for product in measured.products)
    reached = min(1.0, best / device.peak_flop_per_s(measured.precision))
    smallest_s = min(product.seconds for product in measured.products)
    shares = {
        "product_share": reached,
        "memory_share": min(1.0, measured.copy_bytes_per_s / device.memory_bytes_per_s),
        "kernel_s": min(known.kernel_s, smallest_s),
        "node_share": _share(_bus_bytes_per_s(measured), device.node_bytes_per_s, known.node_share),
        "message_share": _share(
            measured.pair_bytes_per_s, device.pair_bytes_per_s, known.message_share
        ),
        "network_share": _share(
            measured.network_bytes_per_s, device.network_bytes_per_s, known.network_share
        ),
        "step_share": 0.0,
    }
    if not measured.is_gpu:
        shares["traffic_share"] = 1.0
        shares |= {"attention_share": reached, "attention_backward_share": reached}
    if measured.hop_s is not None:
        shares["hop_s"] = max(measured.hop_s, measured.network_hop_s or 0.0)
        shares["collective_s"] = (measured.small_all_reduce_s or measured.hop_s) / 2
    return known.model_copy(update={**tile, **shares})


def _share(found: float | None, peak: float, otherwise: float) -> float:
    return otherwise if found is None else min(1.0, found / peak)


def _bus_bytes_per_s(measured: Measured) -> float | None:
    """What each rank sends in an all_reduce: 2 (n-1)/n of the tensor, over the time."""
    if measured.all_reduce_s is None or measured.reduced_bytes is None:
        return measured.pair_bytes_per_s
    ranks = measured.ranks_per_node
    return 2 * (ranks - 1) / ranks * measured.reduced_bytes / measured.all_reduce_s


def _fitted(measured: Measured, device: Device, start: Constants) -> Constants:
    """The constants of products with the least squared logarithm of predicted over measured.

    Each in turn is tried larger and smaller until nothing is better: a few dozen evaluations.
    """
    names = ("product_share", "inner_lost", "tail_waves", "kernel_s")
    best, least = start, _misfit(measured, device, start)
    for _ in range(_ROUNDS):
        before = least
        for name in names:
            for factor in _FACTORS:
                value = getattr(best, name) * factor
                if name == "product_share" and value > 1:
                    continue
                tried = best.model_copy(update={name: value})
                misfit = _misfit(measured, device, tried)
                if misfit < least:
                    best, least = tried, misfit
        if least > before * (1 - 1e-6):
            break
    return best


def _misfit(measured: Measured, device: Device, constants: Constants) -> float:
    return sum(math.log1p(error) ** 2 for error in _errors(measured, device, constants))


def _errors(measured: Measured, device: Device, constants: Constants) -> tuple[float, ...]:
    peak = device.peak_flop_per_s(measured.precision)
    each = measured.element_bytes
    return tuple(
        gemm_s(
            Gemm(
                rows=product.rows,
                inner=product.inner,
                columns=product.columns,
                factor_bytes=each,
                output_bytes=each,
            ),
            device,
            constants,
            peak_flop_per_s=peak,
        )
        / product.seconds
        - 1
        for product in measured.products
    )


def to_toml(found: Calibrated, notes: Sequence[str] = ()) -> str:
    """A cluster file that `Cluster.load` reads. notes: comments at its top."""
    lines = [*(f"# {note}" for note in notes), ""] if notes else []
    figures = found.device.model_dump(exclude_none=True, exclude={"sources", "unofficial"})
    if found.base is not None:
        lines.append(f'base = "{found.base}"')
        sheet = preset(found.base).model_copy(update={"gpus_per_node": None})
        figures = {name: value for name, value in figures.items() if value != getattr(sheet, name)}
    lines += [f"{name} = {_toml(value)}" for name, value in figures.items()]
    lines += [f"nodes = {found.nodes}", "", "[constants]"]
    lines += [f"{name} = {_toml(value)}" for name, value in found.constants.model_dump().items()]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else f"{value}"
