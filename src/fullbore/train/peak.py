"""What the devices can do at most, for MFU: a data sheet's figure, or what matrix products reach.

A CPU's peak is measured, since nobody knows its data sheet under a given number of threads; for
GPUs the *dense* 16-bit figure of the sheet is taken (figures with sparsity are twice as high and
would halve everyone's MFU).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fullbore.cost.hardware import preset, preset_in

__all__ = ["peak_flops", "peak_source"]

_SIZES = (256, 512, 1024, 2048)  # of the square matrices that are multiplied
_TRIES = 3
_LONG_S = 0.05  # a product that takes longer is large enough


def peak_flops(
    device: torch.device, dtype: torch.dtype, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """FLOP/s that one rank's device can reach in matrix products of this type.

    From the preset's dense 16-bit peak where there is one of the device, else the best of a few
    products that are timed now, with the threads that this process has.
    """
    known = _sheet_flops(device, dtype)
    if known is not None:
        return known
    best = 0.0
    for size in _SIZES:
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        best_s = min(_time_product(left, right, clock) for _ in range(_TRIES))
        best = max(best, 2 * size**3 / best_s)
        if best_s > _LONG_S:
            break
    return best


def peak_source(device: torch.device, dtype: torch.dtype) -> str:
    """Where `peak_flops` has its figure from, to be printed beside it."""
    if _sheet_flops(device, dtype) is not None:
        return "the data sheet's dense 16-bit figure"
    return "the best of some matrix products timed here, on all ranks at once"


def _sheet_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        known = preset_in(torch.cuda.get_device_name(device))
        if known is not None:
            return preset(known).peak_flop_per_s("bf16")
    return None


def _time_product(left: torch.Tensor, right: torch.Tensor, clock: Callable[[], float]) -> float:
    _wait(left.device)
    start_s = clock()
    torch.mm(left, right)
    _wait(left.device)
    return max(clock() - start_s, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
