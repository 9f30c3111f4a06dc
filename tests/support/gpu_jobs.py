"""Jobs run by real ranks on CUDA devices, one each."""

from __future__ import annotations

import torch
from gradient_jobs import make
from pipe_models import batch, block_stages, differences, gradients, own, pipeline, reference

from fullbore.passes import offload


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


def offload_on_cuda(rank: int, ranks: int, name: str) -> tuple[list[str], list[int], int, int]:
    """What differs from one process with activations in pinned memory; allocated bytes with and
    without that; copies that were over before they were asked for, or ran into the next one.
    """
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    whole = make((name, 6, 2 if name == "interleaved" else None), ranks)
    wrong: list[str] = []
    allocated: list[int] = []
    misplaced = left = 0
    for schedule in (offload(whole, ahead=1), whole):
        stages, twins = (
            [stage.to(device) for stage in block_stages(schedule.stages)] for _ in range(2)
        )
        with pipeline(stages, schedule, rank, record=True) as pipe:
            for seed in range(3):
                x, y = (t.to(device) for t in batch(6 * 4096, seed=seed))
                _, expected = reference(twins, x.chunk(6), y.chunk(6))
                result = pipe.step(x, y)
                wrong += differences(gradients(own(stages, schedule, rank)), expected)
        assert result.timeline is not None and result.peak_allocated_bytes is not None
        allocated.append(result.peak_allocated_bytes[rank])
        left += sum(result.stage_offload_bytes or ())
        timeline = result.timeline
        mine = timeline.is_copy & (timeline.rank == rank)
        starts_s, ends_s = timeline.start_s[mine], timeline.end_s[mine]
        misplaced += int((ends_s[:-1] > starts_s[1:] + 1e-5).sum() + (ends_s < starts_s).sum())
    return wrong, allocated, misplaced, left
