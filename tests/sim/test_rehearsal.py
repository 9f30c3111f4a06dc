"""A rehearsal says what `simulate` says, to the last bit, and what `live_curves` says of memory."""

from __future__ import annotations

import numpy as np
import pytest

from fullbore.cost import Costs
from fullbore.passes import strip_communication
from fullbore.schedules import FAMILIES, build
from fullbore.sim import Rehearsal, memory_curves, simulate

RUNNABLE = [family for family in FAMILIES if family.runs and not family.takes_slices]


def costs_of(stages: int, seed: int) -> Costs:
    random = np.random.default_rng(seed)

    def stage() -> dict[str, float]:
        f, i, w, kept, held = random.uniform(0.5, 2.0, 5).tolist()
        return {
            "forward_s": f,
            "input_grad_s": i,
            "weight_grad_s": w,
            "activation_bytes": kept,
            "input_grad_held_bytes": held,
        }

    return Costs.parse(
        {
            "stages": [stage() for _ in range(stages)],
            "hop_s": 0.05,
            "message_bytes": 2.0,
            "bandwidth_bytes_per_s": 20.0,
        }
    )


@pytest.mark.parametrize("family", RUNNABLE, ids=lambda family: family.name)
def test_times_and_memory_are_those_of_simulate(family):
    schedule = strip_communication(build(family.name, ranks=4, microbatches=9))
    rehearsal = Rehearsal(schedule)
    for seed, overlap in ((0, True), (1, False), (2, True)):
        costs = costs_of(schedule.stages, seed)
        seconds = np.array(
            [[s.forward_s, s.backward_s, s.input_grad_s, s.weight_grad_s] for s in costs.stages]
        ).T
        ends = rehearsal.ends_s(
            seconds, hop_s=costs.hop_s, occupancy_s=costs.occupancy_s, overlap=overlap
        )
        timeline = simulate(schedule, costs, overlap=overlap)
        compute = timeline.is_compute
        last = np.zeros(4)
        np.maximum.at(last, timeline.rank[compute], timeline.end_s[compute])
        assert ends.tolist() == last.tolist()

        kept = np.array([s.activation_bytes for s in costs.stages])
        held = np.array([s.input_grad_held_bytes for s in costs.stages])
        zero = np.zeros_like(kept)
        levels = rehearsal.levels(
            np.stack([kept, zero, zero, zero]), np.stack([kept, -kept, held - kept, -held])
        )
        ends_at = np.append(rehearsal.first[1:], len(levels))
        after = levels + np.stack([zero, -kept, held - kept, -held]).reshape(-1)[rehearsal.code]
        for rank, curve in enumerate(memory_curves(timeline, schedule, costs)):
            own = slice(rehearsal.first[rank], ends_at[rank])
            assert max(levels[own].max(), after[own].max()) == pytest.approx(curve.peak)
