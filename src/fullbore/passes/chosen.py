"""The stages that a pass is asked to rewrite."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from fullbore.errors import ScheduleError
from fullbore.ir import Schedule

__all__ = ["chosen_stages"]


def chosen_stages(schedule: Schedule, stages: Collection[int] | None) -> npt.NDArray[np.bool_]:
    """[S] whether a stage is among them, all if None; ScheduleError for one that does not exist."""
    chosen = np.zeros(schedule.stages, dtype=np.bool_)
    for stage in range(schedule.stages) if stages is None else stages:
        if not 0 <= stage < schedule.stages:
            raise ScheduleError(f"there is no stage {stage}: stages are 0..{schedule.stages - 1}")
        chosen[stage] = True
    return chosen
