"""Jobs run by real ranks: what a recorded step says."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from gradient_jobs import Case, make
from pipe_models import WIDTH, batch, block_stages, pipeline
from torch import nn

from fullbore.runtime.control import Control
from fullbore.runtime.recorder import clock_offset_s

MINUTE_S = 60.0


def skewed_offset(rank: int, ranks: int) -> float:
    """The offset found for a clock that runs `rank` minutes ahead."""
    store = dist.distributed_c10d._get_default_store()
    control = Control(
        dist.PrefixStore("clocks", store), rank=rank, ranks=ranks, timeout=timedelta(seconds=30)
    )
    return clock_offset_s(control, lambda: time.perf_counter() + MINUTE_S * rank)


def recorded(rank: int, ranks: int, case: Case, **options: Any) -> Any:
    """Timeline, activation bytes and the bytes that one block saves for two rows."""
    schedule = make(case, ranks)
    stages = block_stages(schedule.stages)
    batches = [batch(2 * schedule.microbatches, seed=step) for step in range(2)]
    with torch.device("meta"):  # what a script makes the default is for the script's own tensors
        pipe = pipeline(stages, schedule, rank, record=True, **options)
        for x, y in batches:
            result = pipe.step(x, y)
            pipe.clip_grad_norm(1.0)
    saved = saved_bytes(stages[0], counts_input=rank > 0)
    return result.timeline, result.peak_activation_bytes, saved


def saved_bytes(stage: nn.Module, *, counts_input: bool) -> int:
    """Bytes of distinct storages that autograd saves for a forward of two rows."""
    x = torch.randn(2, WIDTH, requires_grad=True)
    staying = [*stage.parameters(), *([] if counts_input else [x])]
    own_storages = {tensor.untyped_storage().data_ptr() for tensor in staying}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own_storages:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = stage(x)
    assert kept.requires_grad
    return sum(found.values())


def unrecorded(rank: int, ranks: int, case: Case) -> Any:
    """Everything of a result that recording would fill."""
    schedule = make(case, ranks)
    pipe = pipeline(block_stages(schedule.stages), schedule, rank)
    result = pipe.step(*batch(2 * schedule.microbatches))
    return result.timeline, result.peak_activation_bytes, result.boundary_messages
