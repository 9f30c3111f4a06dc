"""Seconds of matrix products of one shape: tiles made in waves, or what memory must move."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fullbore.cost.hardware.device import Constants, Device

__all__ = ["Gemm", "gemm_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """`count` products [rows, inner] x [inner, columns], of which `share` is computed.

    factor_bytes, output_bytes: of one element of a factor, and moved for one of the output.
    """

    rows: float
    inner: float
    columns: float
    count: int = 1
    share: float = 1.0
    factor_bytes: float = 2.0
    output_bytes: float = 2.0

    @property
    def moved_bytes(self) -> float:
        """Both factors and the output, once."""
        factors = self.factor_bytes * self.inner * (self.rows + self.columns)
        return self.count * (factors + self.output_bytes * self.rows * self.columns)


def gemm_s(gemm: Gemm, device: Device, constants: Constants, *, peak_flop_per_s: float) -> float:
    """max(compute, memory) + kernel_s, as `roofline` explains; 0 for an empty product."""
    tiles = _tiles(gemm, constants)
    if tiles == 0 or gemm.inner == 0:
        return 0.0
    area = constants.tile_rows * constants.tile_columns
    flops = 2.0 * tiles * area * (gemm.inner + constants.inner_lost) * gemm.share
    waves = 1 + constants.tail_waves * device.multiprocessors / tiles
    compute_s = flops * waves / (peak_flop_per_s * constants.product_share)
    memory_s = gemm.moved_bytes / (device.memory_bytes_per_s * constants.memory_share)
    return max(compute_s, memory_s) + constants.kernel_s


def _tiles(gemm: Gemm, constants: Constants) -> int:
    """Tiles of all outputs; a row or column too many costs a tile more."""
    rows = math.ceil(gemm.rows / constants.tile_rows)
    return gemm.count * rows * math.ceil(gemm.columns / constants.tile_columns)
