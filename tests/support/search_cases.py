"""Random costs, sizes, memory limits and objectives to search for schedules with."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from fullbore.cost import Costs
from fullbore.search import Found, Job, Limits, MemoryLimit, search

SECONDS = st.integers(min_value=1, max_value=24).map(lambda n: n / 8)
MAYBE_SECONDS = st.integers(min_value=0, max_value=16).map(lambda n: n / 8)
BYTES = st.integers(min_value=1, max_value=9)


@dataclass(frozen=True)
class Case:
    job: Job
    seed: int

    def found(self, moves: int = 1500) -> Found:
        return search(self.job, limits=Limits(time_s=None, moves=moves), seed=self.seed)


@st.composite
def stage(draw: st.DrawFn, *, splits: bool, has_bytes: bool) -> dict[str, float]:
    costs = {"forward_s": draw(SECONDS)}
    if splits:
        costs |= {"input_grad_s": draw(SECONDS), "weight_grad_s": draw(MAYBE_SECONDS)}
    if not splits or draw(st.booleans()):
        costs["backward_s"] = draw(SECONDS)
    if has_bytes:
        costs["activation_bytes"] = draw(BYTES)
        if draw(st.booleans()):
            costs["input_grad_held_bytes"] = draw(BYTES)
        if draw(st.booleans()):
            costs["recompute_input_bytes"] = draw(st.integers(1, 3))
    return costs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    chunks = draw(st.integers(1, 3))
    splits, has_bytes = draw(st.booleans()), draw(st.booleans())
    stages = [draw(stage(splits=splits, has_bytes=has_bytes)) for _ in range(ranks * chunks)]
    costs = Costs.parse(
        {
            "stages": stages,
            "hop_s": draw(MAYBE_SECONDS),
            "message_bytes": draw(st.sampled_from([0, 3])),
            "bandwidth_bytes_per_s": 8,
            "overhead_s": draw(st.sampled_from([0.0, 0.125])),
        }
    )
    limits = [None, "1x", "0.6x", f"{draw(st.integers(1, 9)) / 2}"]
    limits.append(",".join(f"{draw(st.integers(2, 9)) / 2}" for _ in range(ranks)))
    limits += [f"{draw(st.integers(2, 40))}B"] if has_bytes else []
    limit = draw(st.sampled_from(limits))
    return Case(
        job=Job(
            costs=costs,
            ranks=ranks,
            microbatches=microbatches,
            virtual_stages=None,
            memory_limit=None if limit is None else MemoryLimit.parse(limit),
            spans=draw(st.booleans()),
        ),
        seed=draw(st.integers(0, 3)),
    )
