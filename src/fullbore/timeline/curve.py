"""A quantity over time, such as the activations that a rank holds.

A step function, because what it counts changes only where an action starts or ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Curve"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """values[i] holds from times_s[i] until times_s[i + 1]; the last one from then on.

    times_s: float64 [n], ascending seconds on the timeline's clock. values: float64 [n].
    """

    times_s: npt.NDArray[np.float64]
    values: npt.NDArray[np.float64]
