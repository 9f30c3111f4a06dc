"""Against OR-tools: small schedules are proved best, and no bound exceeds what is possible."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.cost import Costs
from fullbore.errors import ConfigError
from fullbore.search import Job, Limits, MemoryLimit, search

# The first search on a machine compiles its kernels, which takes long where others want the cores.
pytestmark = pytest.mark.timeout(400)

pytest.importorskip("ortools")

EIGHTHS = st.integers(min_value=4, max_value=12).map(lambda n: n / 8)
EFFORT = Limits(time_s=None, moves=40_000)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    ranks, microbatches, chunks = draw(st.sampled_from([(2, 4, 1), (3, 3, 1), (2, 2, 2)]))
    keys = ("forward_s", "input_grad_s", "weight_grad_s")
    stages = [{key: draw(EIGHTHS) for key in keys} for _ in range(ranks * chunks)]
    bandwidth = {"message_bytes": draw(st.integers(0, 4)), "bandwidth_bytes_per_s": 8}
    costs = Costs.parse({"stages": stages, "hop_s": draw(st.sampled_from([0, 0.25])), **bandwidth})
    return Job(
        costs=costs,
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=(chunks,),
        memory_limit=MemoryLimit.parse(draw(st.sampled_from(["0.6x", "1x", "2x"]))),
        spans=False,
    )


@settings(max_examples=10)
@given(jobs())
def test_what_is_found_is_proved_best(job):
    found = search(job, limits=EFFORT)
    proved = search(job, limits=EFFORT, prove_s=20)
    assert found.bound_s <= proved.value_s
    assert proved.gap < 1e-6
    assert found.value_s == proved.value_s


def test_a_proof_of_something_large_is_refused():
    costs = Costs.uniform(stages=4, input_grad_s=1, weight_grad_s=1, forward_s=2)
    limit = MemoryLimit.parse("0.6x")
    job = Job(
        costs=costs,
        ranks=4,
        microbatches=4,
        virtual_stages=None,
        memory_limit=limit,
        spans=True,
    )
    effort = Limits(time_s=None, moves=1)
    assert search(job, limits=effort, prove_s=0.1).bound_s > 0
    with pytest.raises(ConfigError, match="proofs are for"):
        search(replace(job, microbatches=400), limits=effort, prove_s=0.1)
