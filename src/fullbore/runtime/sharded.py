"""Stages whose weights `torch.distributed.fsdp.fully_shard` has split over the replicas (FSDP2).

Left to itself it gathers weights and scatters gradients around every microbatch. Here a stage's
weights are gathered by the step's first forward and let go by its last backward, and only that
one sums gradients: one gather and one reduction a step and sharded module.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from fullbore.ir import Kind, Schedule

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

__all__ = ["ShardedStages", "is_sharded", "local_part", "objection_to_shards"]


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over ranks.

    What made it has imported its class, which takes a second and is not done here for nothing.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or of one that is spread over ranks this rank's shard."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def _is_unit(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` was called on a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class ShardedStages:
    """The modules of this rank's stages that are sharded; none is no trouble."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._units = {
            stage: [m for m in module.modules() if _is_unit(m)] for stage, module in stages.items()
        }
        for units in self._units.values():
            for unit in units:
                unit.set_reshard_after_forward(False, recurse=False)
                # the pipeline's own weight of the loss makes the sum over replicas a mean
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)

    def begin(self) -> None:
        """A training step begins: keep weights and gradients until the last backward."""
        for stage in self._units:
            self._set_last(stage, last=False)

    def before_last(self, stage: int) -> None:
        """The stage's last backward comes next: it sums gradients and lets go of weights."""
        self._set_last(stage, last=True)

    def let_go(self) -> None:
        """After forwards without backwards: back to one shard a replica."""
        for units in self._units.values():
            for unit in units:
                unit.reshard()

    def _set_last(self, stage: int, *, last: bool) -> None:
        for unit in self._units[stage]:
            unit.set_requires_gradient_sync(last, recurse=False)
            unit.set_reshard_after_backward(last, recurse=False)
            unit.set_is_last_backward(last)


def objection_to_shards(
    stages: Mapping[int, nn.Module], schedule: Schedule, *, replicas: int, tied: bool
) -> str | None:
    """What is wrong with sharded stages, or None."""
    for stage, module in stages.items():
        shards = [p for p in module.parameters() if is_sharded(p)]
        sharded = any(map(_is_unit, module.modules()))
        sizes = {p.device_mesh.size() for p in shards}
        if shards and not sharded:
            return (
                f"stage {stage} has distributed tensors that fully_shard did not make: stages of "
                "tensor-parallel modules are not supported"
            )
        if sizes - {replicas}:
            return (
                f"stage {stage} is sharded over {max(sizes - {replicas})} ranks, and there are "
                f'{replicas} replicas: use fully_shard(module, mesh=mesh["dp"]) and '
                "Pipeline(mesh=mesh)"
            )
        if sharded and tied:
            return (
                f"stage {stage} is sharded by fully_shard, and there are tied weights: their "
                "gradients are not summed shard by shard; shard optimizer states only (ZeRO-1)"
            )
        if sharded and _splits(schedule, stage):
            return (
                f"stage {stage} is sharded by fully_shard, which reduces gradients in a whole "
                f"backward, and {schedule.name} splits its backward into I and W: choose a "
                "schedule that does not, or shard optimizer states only (ZeRO-1)"
            )
    return None


def _splits(schedule: Schedule, stage: int) -> bool:
    program = schedule.programs[schedule.placement.stage_to_rank[stage]]
    return bool(((program.kind == Kind.I) & (program.stage == stage)).any())
