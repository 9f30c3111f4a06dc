"""One schedule made ready to be simulated many times, under other costs each time.

Who waits for whom, over which link, follows from the schedule alone and is most of what `simulate`
works out. A planner asks about one schedule under hundreds of costs; here that part is kept, and so
are the arrays that the kernel fills. Times are those of `simulate`, to the last bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fullbore.cost import Costs
from fullbore.ir import Kind, Schedule
from fullbore.sim.engine import compiled, problem_of, refuse_deadlock

__all__ = ["Rehearsal"]

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

_KINDS = 4  # F, B, I, W


class Rehearsal:
    """A schedule of whole sequences without copies or recomputations of its own.

    code [N]: kind * S + stage of each action, by which tables [4, S] are read. first [P]: where
    each rank's actions begin. Raises what `simulate` raises where the schedule cannot run.
    """

    def __init__(self, schedule: Schedule) -> None:
        assert schedule.slices == 1, "a slice takes a share of a stage's time"
        unit = Costs.uniform(stages=schedule.stages, input_grad_s=1.0, weight_grad_s=1.0)
        problem = problem_of(schedule, unit)
        flat = problem.flat
        assert not (flat.kind > Kind.W).any(), "copies and recomputations are not rehearsed"
        self.schedule = schedule
        self.code: Indices = flat.kind.astype(np.int64) * schedule.stages + flat.stage
        self.first: Indices = flat.offsets[:-1]
        self._last: Indices = flat.offsets[1:] - 1
        self._flat = flat
        self._position = np.zeros(schedule.ranks, dtype=np.int64)
        self._usable_s = np.zeros(len(flat.kind))
        self._start_s, self._end_s = np.zeros(len(flat.kind)), np.zeros(len(flat.kind))
        self._occupancy_s = np.zeros(len(flat.kind))
        self._zeroed = np.zeros(schedule.ranks), np.zeros(problem.links)
        self._awaited = np.zeros(schedule.ranks, dtype=np.int64)
        self._fixed = {
            "offsets": flat.offsets,
            "provider": problem.provider,
            "reload": problem.reload,
            "reader": problem.reader,
            "link": problem.link,
            "lead_s": problem.lead_s,
            "reached_s": np.zeros(len(flat.kind)),
            "left_s": np.zeros(len(flat.kind)),
            "runnable": np.zeros(schedule.ranks, dtype=np.int64),
        }

    @property
    def actions(self) -> int:
        """N."""
        return len(self.code)

    def ends_s(
        self, seconds: Floats, *, hop_s: float, occupancy_s: float, overlap: bool = True
    ) -> Floats:
        """When each rank's last action ends [P].

        seconds: [4, S], of F, B, I and W of each stage. hop_s, occupancy_s: as `Costs` has them.
        """
        self._usable_s.fill(-1.0)
        self._position.fill(0)
        self._awaited.fill(-1)
        if self._occupancy_s[0] != occupancy_s:
            self._occupancy_s.fill(occupancy_s)
        clock_s, link_free_s = self._zeroed
        clock_s.fill(0.0)
        link_free_s.fill(0.0)
        compiled()(
            **self._fixed,
            occupancy_s=self._occupancy_s,
            duration_s=seconds.reshape(-1)[self.code],
            start_s=self._start_s,
            end_s=self._end_s,
            usable_s=self._usable_s,
            position=self._position,
            awaited=self._awaited,
            clock_s=clock_s,
            link_free_s=link_free_s,
            hop_s=hop_s,
            blocking=not overlap,
        )
        refuse_deadlock(self._flat, self._position)
        return self._end_s[self._last]

    def levels(self, rise: Floats, change: Floats) -> Floats:
        """The most that an action's rank holds while it runs [N]; order alone decides it.

        rise, change: [4, S], how far what is held rises above what it was while an action runs,
        and what the action leaves, in one unit.
        """
        changes = change.reshape(-1)[self.code]
        # a rank ends as empty as it began, so one sum over all ranks serves each of them
        held = np.cumsum(changes)
        held -= changes
        held += rise.reshape(-1)[self.code]
        return held
