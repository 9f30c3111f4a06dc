"""Steps whose actions jitter: seeded, of the distribution that is promised, and priced exactly."""

from __future__ import annotations

import numpy as np
import pytest

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.errors import ConfigError
from fullbore.sim import simulate, spread
from fullbore.sim.jitter import factors


def pair(stages: int = 4):
    schedule = schedules.build("1f1b", ranks=stages, microbatches=8)
    return schedule, Costs.uniform(stages=stages, hop_s=0.125)


def test_factors_have_mean_one_and_the_deviation_asked_for():
    drawn = factors(np.random.default_rng(1), jitter=0.2, shape=(200_000,))
    assert drawn.min() > 0
    assert drawn.mean() == pytest.approx(1, abs=2e-3)
    assert drawn.std() == pytest.approx(0.2, abs=2e-3)


def test_a_seed_gives_the_same_steps_and_another_one_others():
    schedule, costs = pair()
    first, again, other = (spread(schedule, costs, jitter=0.1, seed=s) for s in (3, 3, 4))
    assert first.makespans_s.tolist() == again.makespans_s.tolist()
    assert first.makespans_s.tolist() != other.makespans_s.tolist()
    assert len(first.makespans_s) == 200
    assert first.quantile_s(0.0) <= first.quantile_s(0.5) <= first.quantile_s(1.0)


def test_no_jitter_is_the_simulation_itself():
    schedule, costs = pair()
    made = spread(schedule, costs, jitter=0.0, samples=3)
    exact_s = simulate(schedule, costs).makespan_s
    assert made.exact_s == exact_s
    assert made.makespans_s.tolist() == [exact_s] * 3


def test_jitter_costs_time_since_many_wait_for_the_slowest():
    schedule, costs = pair(8)
    made = spread(schedule, costs, jitter=0.2, samples=500)
    assert made.mean_s > made.exact_s * 1.01


def test_one_rank_alone_has_the_sum_of_its_actions():
    schedule, costs = schedules.build("1f1b", ranks=1, microbatches=100), Costs.uniform(stages=1)
    made = spread(schedule, costs, jitter=0.3, samples=2000)
    assert made.mean_s == pytest.approx(300, rel=5e-3)
    assert made.makespans_s.std() == pytest.approx(0.3 * np.sqrt(100 * (1 + 4)), rel=0.1)


@pytest.mark.parametrize(
    "wrong", [{"jitter": -0.1}, {"jitter": float("nan")}, {"jitter": 0.1, "samples": 0}]
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ConfigError):
        spread(*pair(), **wrong)
