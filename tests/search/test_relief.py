"""Search beyond the memory limit: what leaves or is made again brings schedules within it."""

import numpy as np
import pytest

from fullbore.cost import Costs
from fullbore.errors import ConfigError, CostsError
from fullbore.ir import Kind
from fullbore.search import Jitter, Job, Limits, MemoryLimit, search
from fullbore.sim import memory_curves, simulate
from fullbore.verify import verify

# The first search on a machine compiles its kernels, which takes long where others want the cores.
pytestmark = pytest.mark.timeout(400)

GB = 1e9
STAGE = {
    "forward_s": 1.0,
    "input_grad_s": 1.0,
    "weight_grad_s": 0.8,
    "activation_bytes": GB,
    "input_grad_held_bytes": 0.7 * GB,
}
AGAIN = {"recompute_input_bytes": 0.1 * GB, "recompute_s": 0.2}


def job(limit: str, means, *, stage=None, spans=False, **costs) -> Job:
    """Four ranks with two stages each, of which 1F1B's first would hold 8 GB."""
    return Job(
        costs=Costs.parse({"stages": [STAGE | (stage or {})] * 8, "hop_s": 0.05, **costs}),
        ranks=4,
        microbatches=8,
        virtual_stages=(2,),
        memory_limit=MemoryLimit.parse(limit),
        spans=spans,
        means=means,
    )


def find(sought: Job):
    found = search(sought, limits=Limits(time_s=None, moves=20_000))
    timeline = simulate(found.schedule, found.costs)
    peaks = [curve.peak for curve in memory_curves(timeline, found.schedule, found.costs)]
    assert verify(found.schedule) == []
    assert (np.array(peaks) <= np.array(sought.memory_limit.amounts) * (1 + 1e-9)).all()
    assert found.bound_s <= found.value_s * (1 + 1e-9)
    if not sought.spans:
        assert found.value_s == pytest.approx(timeline.makespan_s, rel=1e-12)
    return found


@pytest.mark.parametrize("spans", [False, True], ids=["makespan", "span"])
def test_activations_leave_and_less_time_is_lost(spans) -> None:
    kept = find(job("2.2GB", (), spans=spans))
    found = find(job("2.2GB", ("offload",), spans=spans, offload_bytes_per_s=4 * GB))
    assert found.schedule.has(Kind.OFFLOAD) and not found.schedule.has(Kind.R)
    assert found.value_s < 0.8 * kept.value_s
    assert found.named is None and kept.named is None


def test_ranks_that_have_less_room_send_more_away() -> None:
    found = find(job("2.2GB,9GB,9GB,9GB", ("offload",), offload_bytes_per_s=4 * GB))
    leaving = [bool((program.kind == Kind.OFFLOAD).any()) for program in found.schedule.programs]
    assert leaving == [True, False, False, False]


def test_activations_are_made_again_where_the_schedule_says_so() -> None:
    """Stages that keep theirs say nothing of recomputation in the costs of what was found."""
    found = find(job("2.2GB", ("recompute",), stage=AGAIN))
    assert found.schedule.has(Kind.R)
    for stage, cost in enumerate(found.costs.stages):
        again = found.schedule.has(Kind.R, stage=stage)
        assert (cost.recompute_input_bytes is not None) == again


def test_the_cheaper_of_two_means_is_taken() -> None:
    """A slow link to the host makes it recomputation, a fast one offload."""
    both = ("offload", "recompute")
    slow = find(job("2.2GB", both, stage=AGAIN, offload_bytes_per_s=0.05 * GB))
    assert slow.schedule.has(Kind.R) and not slow.schedule.has(Kind.OFFLOAD)
    fast = find(job("2.2GB", both, stage=AGAIN, offload_bytes_per_s=40 * GB))
    assert fast.schedule.has(Kind.OFFLOAD) and not fast.schedule.has(Kind.R)


def test_it_is_no_worse_than_a_named_schedule_that_fits() -> None:
    found = find(job("4GB", ("offload",), offload_bytes_per_s=4 * GB))
    assert found.named is not None and found.value_s <= found.named.value_s


def test_what_lacks_costs_or_a_limit_is_refused() -> None:
    with pytest.raises(CostsError, match="give offload_s of every stage"):
        find(job("4GB", ("offload",)))
    with pytest.raises(CostsError, match="recompute_input_bytes of every stage"):
        find(job("4GB", ("recompute",)))
    sought = job("4GB", ("offload",), offload_bytes_per_s=GB)
    with pytest.raises(ConfigError, match="leave out either of the two"):
        search(sought, jitter=Jitter())
    with pytest.raises(ConfigError, match="leave out --prove, or --allow"):
        search(sought, prove_s=1.0)
    with pytest.raises(ConfigError, match="gain nothing where memory has no limit"):
        search(Job(**{f: getattr(sought, f) for f in sought.__slots__} | {"memory_limit": None}))
