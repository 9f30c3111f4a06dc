"""How long a step takes when its actions do not always take the same time.

Measured times jitter, and what waits for the slowest of many is late more often than any one of
them. So a schedule is simulated many times, with every compute action's duration multiplied by a
random factor of its own: log-normal, since times cannot be negative and are late by more than they
are ever early, with mean 1 and the relative standard deviation that is asked for. Messages, copies
and host overhead stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fullbore.cost import Costs
from fullbore.errors import ConfigError
from fullbore.ir import Kind, Schedule
from fullbore.sim.engine import problem_of, run

__all__ = ["Spread", "factors", "spread"]

Floats = npt.NDArray[np.float64]

MOST_JITTER = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """Makespans of many steps, ascending [n], seconds; and what they were drawn from.

    exact_s: the makespan with no jitter at all.
    """

    makespans_s: Floats
    exact_s: float
    jitter: float
    seed: int

    @property
    def mean_s(self) -> float:
        """The mean."""
        return float(self.makespans_s.mean())

    def quantile_s(self, share: float) -> float:
        """The makespan that this share of the steps does not exceed (linear between samples)."""
        return float(np.quantile(self.makespans_s, share))


def factors(random: np.random.Generator, *, jitter: float, shape: tuple[int, ...]) -> Floats:
    """Log-normal factors of mean 1 and relative standard deviation `jitter`."""
    variance = np.log1p(jitter**2)
    return np.asarray(np.exp(np.sqrt(variance) * random.standard_normal(shape) - variance / 2))


def spread(
    schedule: Schedule,
    costs: Costs,
    *,
    jitter: float,
    samples: int = 200,
    seed: int = 0,
    overlap: bool = True,
) -> Spread:
    """Simulate `samples` steps whose compute actions jitter; linear in samples times actions.

    jitter: relative standard deviation of each compute action's duration, such as 0.1. Raises
    ConfigError for a jitter that is none or no samples, and what `simulate` raises.
    """
    if not 0.0 <= jitter <= MOST_JITTER:
        raise ConfigError(f"a jitter of {jitter:g}: give a share from 0 to {MOST_JITTER:g}")
    if samples < 1 or seed < 0:
        raise ConfigError(
            f"{samples} samples from seed {seed}: give 1 or more, from seed 0 or more"
        )
    problem, random = problem_of(schedule, costs), np.random.default_rng(seed)
    compute = problem.flat.kind < Kind.OFFLOAD
    many = samples + 1

    def makespan_s(factor: Floats) -> float:
        drawn = replace(problem, duration_s=problem.duration_s * factor)
        times = run(schedule, drawn, costs, blocking=not overlap, times=many)
        return float(times.end_s[compute].max(initial=0.0))

    actions = (len(problem.duration_s),)
    drawn = (factors(random, jitter=jitter, shape=actions) for _ in range(samples))
    return Spread(
        makespans_s=np.sort([makespan_s(factor) for factor in drawn]),
        exact_s=makespan_s(np.ones(actions)),
        jitter=jitter,
        seed=seed,
    )
