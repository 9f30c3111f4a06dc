"""What the optimizer of a step costs."""

from __future__ import annotations

from fullbore.cost.hardware.layout import Layout
from fullbore.cost.model.split import Precision

__all__ = ["optimizer_s"]


def optimizer_s(
    layout: Layout, precision: Precision, *, parameters: float, shards: int = 1
) -> float:
    """Seconds of an Adam step over a rank's parameters, 1/shards of them with ZeRO-1.

    Memory moved: gradients read for the norm, read for the step and set to zero; the main weights
    (the weights where there are no others) and the moments read and written; weights written.
    """
    device, constants = layout.cluster.device, layout.cluster.constants
    main = precision.main_weight or precision.weight
    copied = precision.weight if precision.main_weight else 0.0
    moved = 3 * precision.gradient + 2 * main + 2 * precision.moments + copied
    per_second = device.memory_bytes_per_s * constants.memory_share
    return parameters / shards * moved / per_second
