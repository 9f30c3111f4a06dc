"""Jobs run by real ranks on CUDA devices, one each."""

from __future__ import annotations

import torch
from gradient_jobs import make
from pipe_models import batch, block_stages, differences, gradients, own, pipeline, reference


def gradients_on_cuda(rank: int, ranks: int, name: str) -> list[str]:
    """What differs from one process on the same device, over two steps."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    schedule = make((name, 4, 2 if name == "interleaved" else None), ranks)
    stages, twins = (
        [stage.to(device) for stage in block_stages(schedule.stages)] for _ in range(2)
    )
    pipe = pipeline(stages, schedule, rank)
    wrong: list[str] = []
    for seed in range(2):
        x, y = (t.to(device) for t in batch(8, seed=seed))
        _, expected = reference(twins, x.chunk(4), y.chunk(4))
        pipe.step(x, y)
        wrong += differences(gradients(own(stages, schedule, rank)), expected)
    return wrong


def recorded_on_cuda(
    rank: int, ranks: int
) -> tuple[float, float, tuple[int, ...], tuple[int, ...]]:
    """From the first span's start to the last one's end, the step's seconds, allocated and saved
    bytes of each rank.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    schedule = make(("1f1b", 4, None), ranks)
    stages = [stage.to(device) for stage in block_stages(schedule.stages)]
    pipe = pipeline(stages, schedule, rank)
    pipe.record = True
    x, y = (t.to(device) for t in batch(8, seed=0))
    pipe.step(x, y)
    result = pipe.step(x, y)
    assert result.timeline is not None and result.peak_allocated_bytes is not None
    assert result.peak_activation_bytes is not None
    spans_s = float(result.timeline.end_s.max() - result.timeline.start_s.min())
    return spans_s, result.step_s, result.peak_allocated_bytes, result.peak_activation_bytes
