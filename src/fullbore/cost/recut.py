"""The costs of a model cut into another number of stages, as far as the old cut can tell.

Within a stage nothing is known of where its time goes, so it is taken to be spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from fullbore.cost.costs import Costs, StageCosts
from fullbore.errors import CostsError

__all__ = ["recut"]


def recut(costs: Costs, *, stages: int) -> Costs:
    """The same model in `stages` stages: each old one split evenly, or neighbours joined.

    Everything else stays as it is. Raises CostsError where neither number divides the other,
    naming the nearest that do.
    """
    have = len(costs.stages)
    if stages >= 1 and stages % have == 0:
        parts = stages // have
        cut = [_scaled(stage, 1 / parts) for stage in costs.stages for _ in range(parts)]
    elif stages >= 1 and have % stages == 0:
        joined = have // stages
        cut = [_sum(costs.stages[s * joined : (s + 1) * joined]) for s in range(stages)]
    else:
        legal = [
            n for n in range(1, max(stages, have) + have + 1) if n % have == 0 or have % n == 0
        ]
        near = sorted(legal, key=lambda n: (abs(n - stages), n))[:2]
        raise CostsError(
            f"the costs are of {have} stages and cannot be told for {stages}: the nearest legal "
            f"numbers of stages are {' and '.join(map(str, sorted(near)))}"
        )
    return costs.model_copy(update={"stages": tuple(cut)})


def _scaled(stage: StageCosts, share: float) -> StageCosts:
    given = stage.model_dump(exclude_none=True)
    return StageCosts(**{name: value * share for name, value in given.items()})


def _sum(stages: Sequence[StageCosts]) -> StageCosts:
    """The sum of each value that all of them give."""
    given = [stage.model_dump(exclude_none=True) for stage in stages]
    shared = set.intersection(*(set(values) for values in given))
    return StageCosts(**{name: sum(values[name] for values in given) for name in shared})
