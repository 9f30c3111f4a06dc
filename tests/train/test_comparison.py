"""How a comparison runs a schedule, without processes: a runner that is told what to give."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from comparisons import TRAINED, measurement, ran

from fullbore import schedules
from fullbore.compare import Length
from fullbore.cost import Costs
from fullbore.ir import Kind, Schedule
from fullbore.train.bar import Nobody
from fullbore.train.comparison import Handover, Stepped, measure
from fullbore.train.paced import nominal
from fullbore.train.team import Team

SCHEDULE = schedules.one_f_one_b(ranks=2, microbatches=2)


@dataclass
class Fake:
    """A runner whose steps take 1, 2, 3 ... seconds and hold 10, 20, 30 ... bytes."""

    schedule: Schedule = SCHEDULE
    done: list[str] = field(default_factory=list)

    def evaluate(self) -> float:
        self.done.append("evaluate")
        return 9.0 - self.done.count("step")

    def step(self) -> Stepped:
        self.done.append("step")
        number = self.done.count("step")
        return Stepped(
            step_s=float(number),
            loss=10.0 - number,
            timeline=ran(self.schedule),
            peak_activation_bytes=(10 * number, 40 - 10 * number),
            stage_activation_bytes=(5, 6),
            stage_held_bytes=None,
            stage_input_bytes=None,
        )

    def close(self) -> None:
        self.done.append("close")


def run(runner: Fake, *, steps: int, warmup_steps: int, stop_after: int | None = None):
    return measure(
        runner,
        Length(steps=steps, warmup_steps=warmup_steps),
        team=Team(),
        watcher=Nobody(),
        should_stop=lambda: runner.done.count("step") == stop_after,
    )


def test_the_first_steps_are_not_measured_and_losses_are_of_all():
    runner = Fake()
    found = run(runner, steps=3, warmup_steps=1)
    assert runner.done == ["evaluate", "step", "step", "step", "evaluate"]
    assert found.step_s == (2, 3) and len(found.timelines) == 2
    assert found.losses == (9, 8, 7)
    assert (found.held_out_before, found.held_out_after) == (9, 6)
    assert found.peak_activation_bytes == (30, 20)  # each rank's most, of steps 2 and 3
    assert found.stage_activation_bytes == (5, 6)
    assert found.complete


def test_what_was_measured_before_a_stop_is_kept():
    runner = Fake()
    found = run(runner, steps=5, warmup_steps=1, stop_after=2)
    assert runner.done == ["evaluate", "step", "step"]
    assert found.step_s == (2,) and not found.complete
    assert found.held_out_after is None


def test_a_stop_in_the_warm_up_leaves_nothing():
    assert run(Fake(), steps=5, warmup_steps=3, stop_after=2) is None


def test_a_handover_keeps_the_order(tmp_path: Path):
    handover = Handover(tmp_path)
    assert handover.take() == (None, [])
    for name in ("1f1b", "gpipe"):
        handover.put(TRAINED, measurement(name, 2, 4))
    setting, found = handover.take()
    assert setting == TRAINED
    assert [one.schedule.name for one in found] == ["1f1b", "gpipe"]
    np.testing.assert_array_equal(
        found[0].typical.start_s, measurement("1f1b", 2, 4).typical.start_s
    )


def test_a_paced_action_is_busy_for_its_nominal_time_and_keeps_its_end():
    real = ran(SCHEDULE)
    costs = Costs.uniform(stages=2, forward_s=0.25, backward_s=0.5)
    found = nominal(real, costs)
    lasts_s = found.end_s - found.start_s
    assert lasts_s[found.kind == Kind.F] == pytest.approx(0.25)
    assert lasts_s[found.kind == Kind.B] == pytest.approx(0.5)
    np.testing.assert_array_equal(found.end_s, real.end_s)
    messages = ~found.is_compute
    np.testing.assert_array_equal(found.start_s[messages], real.start_s[messages])


def test_a_paced_action_is_never_longer_than_it_was():
    real = ran(SCHEDULE)
    found = nominal(real, Costs.uniform(stages=2, forward_s=100, backward_s=100))
    np.testing.assert_array_equal(found.start_s, real.start_s)
