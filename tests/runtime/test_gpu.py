"""The CUDA side: NCCL links and stream waits. Needs as many devices as ranks."""

import gpu_jobs as jobs
import pytest
import torch
from ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_gradients_on_cuda_equal_one_process(name: str) -> None:
    """With one device P = 1; with two or more, P = 2 over NCCL."""
    ranks = min(2, torch.cuda.device_count())
    assert run_ranks(jobs.gradients_on_cuda, ranks, ranks, name) == [[]] * ranks


def test_a_recorded_step_on_cuda_has_device_times_and_the_allocator_s_peak() -> None:
    ranks = min(2, torch.cuda.device_count())
    for spans_s, step_s, peaks, activations in run_ranks(jobs.recorded_on_cuda, ranks, ranks):
        assert len(peaks) == ranks
        assert all(peak > kept > 0 for peak, kept in zip(peaks, activations, strict=True))
        assert 0 < spans_s <= step_s


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_activations_in_pinned_memory(name: str) -> None:
    """Bit for bit, copies in order, and with GPipe less memory than without."""
    ranks = min(2, torch.cuda.device_count())
    for wrong, allocated, misplaced, left in run_ranks(jobs.offload_on_cuda, ranks, ranks, name):
        assert wrong == [] and misplaced == 0 and left > 0
        if name == "gpipe":
            assert allocated[0] < allocated[1]
