"""What a step costs besides its pipeline: gradients summed over replicas, and the optimizer."""

from __future__ import annotations

from fullbore.cost.hardware.layout import Layout
from fullbore.cost.model.split import Precision

__all__ = ["optimizer_s", "reduction_s", "step_s"]


def reduction_s(
    layout: Layout,
    precision: Precision,
    *,
    dense: float,
    expert: float = 0.0,
    distributed: bool = False,
) -> float:
    """Seconds in which a rank's gradients are summed over its replicas, with nothing beside it.

    dense, expert: parameters on the rank. distributed: ZeRO-1, where gradients are scattered and
    weights gathered; otherwise an all_reduce of gradients.
    """
    total_s = 0.0
    for group, parameters in (("gradient", dense), ("expert_gradient", expert)):
        gradients = parameters * precision.gradient
        if distributed:
            total_s += layout.collective_s("reduce_scatter", gradients, group)
            total_s += layout.collective_s("all_gather", parameters * precision.weight, group)
        else:
            total_s += layout.collective_s("all_reduce", gradients, group)
    return total_s


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


def step_s(layout: Layout, *, pipeline_s: float, reduction_s: float, optimizer_s: float) -> float:
    """Seconds of a step: the pipeline's makespan, slowed by `step_share`, and what follows it.

    reduction_s: what of it nothing hides.
    """
    lost = 1 + layout.cluster.constants.step_share
    return pipeline_s * lost + reduction_s + optimizer_s
