"""Costs read off timelines: by hand, and from the simulator's own, which gives them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.cost.measured import costs_of
from fullbore.errors import CostsError
from fullbore.ir import Action, Schedule
from fullbore.passes import insert_communication
from fullbore.sim import simulate
from fullbore.timeline import Timeline

TWO = schedules.gpipe(ranks=2, microbatches=1)


def timeline(*spans: tuple[int, str, float, float], ranks: int = 2) -> Timeline:
    """A measured timeline from (rank, action, start, end) rows."""
    actions = [Action.parse(text) for _, text, _, _ in spans]
    return Timeline(
        source="measured",
        name="by hand",
        ranks=ranks,
        rank=np.array([rank for rank, *_ in spans], dtype=np.int32),
        kind=np.array([action.kind for action in actions], dtype=np.int8),
        stage=np.array([action.stage for action in actions], dtype=np.int32),
        microbatch=np.array([action.microbatch for action in actions], dtype=np.int32),
        start_s=np.array([start for *_, start, _ in spans]),
        end_s=np.array([end for *_, end in spans]),
    )


def step(*, late: float = 0.0) -> Timeline:
    """One microbatch over two ranks: F 10 and 20 long, B 30 and 40, hop 2, host time 1."""
    return timeline(
        (0, "0F0", 0, 10),
        (0, "0SEND_F0", 10, 11.5),
        (0, "0RECV_B0", 11, 76 + late),
        (0, "0B0", 77 + late, 107 + late),
        (1, "1RECV_F0", 0, 12),
        (1, "1F0", 13, 33),
        (1, "1B0", 34, 74),
        (1, "1SEND_B0", 74, 75),
    )


def stages(costs: Costs) -> Sequence[tuple[float, float]]:
    return [(stage.forward_s, stage.backward_s) for stage in costs.stages]


def test_by_hand():
    costs = costs_of([step()], TWO)
    assert stages(costs) == [(10, 30), (20, 40)]
    assert costs.hop_s == 2
    assert costs.overhead_s == 1
    assert costs.message_bytes == 0 and costs.stages[0].activation_bytes is None


def test_one_disturbed_step_of_three_changes_nothing():
    assert costs_of([step(), step(late=50), step()], TWO) == costs_of([step()], TWO)


def test_a_message_that_waited_for_its_receiver_is_no_hop_and_its_taking_is_host_time():
    spans = [
        (0, "0F0", 0, 10),
        (0, "0F1", 12, 22),
        (0, "0B0", 60, 70),
        (0, "0B1", 70, 80),
        (1, "1RECV_F0", 0, 11),  # waits: hop 1
        (1, "1F0", 11, 41),
        (1, "1RECV_F1", 42, 43),  # was there since 23: 42 - 41, 1 of taking, 44 - 43 are host time
        (1, "1F1", 44, 74),
        (1, "1B0", 74, 84),
        (1, "1B1", 84, 94),
    ]
    costs = costs_of([timeline(*spans)], schedules.gpipe(ranks=2, microbatches=2))
    assert costs.hop_s == 1
    # rank 0: 2 before F1, 38 of idle that nothing explains before B0, 0; rank 1: 0, 3, 0, 0
    assert costs.overhead_s == pytest.approx((2 + 38 + 0 + 0 + 3 + 0 + 0) / 7)


def test_a_message_on_its_way_is_waited_for_only_until_it_can_be_there():
    spans = [
        (0, "0F0", 0, 10),
        (0, "0F1", 10, 20),
        (1, "1RECV_F0", 0, 14),  # hop 4
        (1, "1F0", 14, 21),
        (1, "1RECV_F1", 22, 30),  # made at 20, there at 24; 6 until 30 and 1 after are host time
        (1, "1F1", 31, 38),
        (1, "1B0", 38, 39),
        (1, "1B1", 39, 40),
        (0, "0B0", 41, 42),
        (0, "0B1", 42, 43),
    ]
    rows = sorted(spans, key=lambda span: span[0])
    costs = costs_of([timeline(*rows)], schedules.gpipe(ranks=2, microbatches=2))
    assert costs.hop_s == 4
    # rank 0: 0 before F1, 21 before B0 (no RECV), 0; rank 1: 0, 31 - 24, 0, 0
    assert costs.overhead_s == pytest.approx((0 + 21 + 0 + 0 + 7 + 0 + 0) / 7)


def test_medians_over_microbatches_and_steps():
    one = schedules.gpipe(ranks=1, microbatches=3)
    rows = [(0, f"0F{m}", 10 * m, 10 * m + (1, 2, 9)[m]) for m in range(3)]
    rows += [(0, f"0B{m}", 30 + 10 * m, 30 + 10 * m + (3, 5, 4)[m]) for m in range(3)]
    assert stages(costs_of([timeline(*rows, ranks=1)], one)) == [(2, 4)]


def test_a_microbatch_in_slices_costs_what_they_cost_together():
    one = schedules.seq1f1b(ranks=1, microbatches=3, slices=2)
    lasts = {"F": {0: (2, 2, 9), 1: (3, 3, 4)}, "B": {0: (5, 5, 5), 1: (7, 7, 8)}}  # by slice
    rows = [
        (0, f"0{kind}{2 * m + number}", 0.0, float(times[m]))
        for kind, by_slice in lasts.items()
        for number, times in by_slice.items()
        for m in range(3)
    ]
    assert stages(costs_of([timeline(*rows, ranks=1)], one)) == [(2 + 3, 5 + 7)]


def test_bytes_are_kept_and_saved(tmp_path):
    costs = costs_of([step()], TWO, activation_bytes=[100, 200], message_bytes=64)
    assert [stage.activation_bytes for stage in costs.stages] == [100, 200]
    assert costs.message_bytes == 64
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs


def split(schedule: Schedule) -> Schedule:
    """The schedule with every B as I and W."""
    from fullbore.ir import Program

    def halves(action: Action) -> list[Action]:
        text = str(action)
        return [Action.parse(text.replace("B", k)) for k in "IW"] if "B" in text else [action]

    return Schedule(
        name=schedule.name,
        microbatches=schedule.microbatches,
        placement=schedule.placement,
        programs=tuple(Program.of(a for x in p for a in halves(x)) for p in schedule.programs),
    )


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "schedule",
    [
        schedules.gpipe(ranks=2, microbatches=3),
        schedules.one_f_one_b(ranks=4, microbatches=8),
        schedules.interleaved(ranks=2, microbatches=4, virtual_stages=2),
        schedules.interleaved(ranks=4, microbatches=8, virtual_stages=3),
        schedules.looped_bfs(ranks=3, microbatches=5, virtual_stages=2),
        split(schedules.one_f_one_b(ranks=3, microbatches=6)),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.ranks}",
)
def test_costs_of_a_simulated_step_are_what_it_was_simulated_with(schedule, overlap):
    halves = {"input_grad_s": 0.9, "weight_grad_s": 1.1} if schedule.splits_backward else {}
    true = Costs.parse(
        {
            "stages": [
                {"forward_s": 1 + 0.1 * s, **(halves or {"backward_s": 2 + 0.1 * s})}
                for s in range(schedule.stages)
            ],
            "hop_s": 0.03,
            "overhead_s": 0.02,
        }
    )
    ran = simulate(insert_communication(schedule), true, overlap=overlap)
    found = costs_of([ran], schedule, overlap=overlap)
    assert found.hop_s == pytest.approx(true.hop_s)
    assert found.overhead_s == pytest.approx(true.overhead_s)
    for ours, given in zip(found.stages, true.stages, strict=True):
        assert ours.model_dump(exclude_none=True) == pytest.approx(
            given.model_dump(exclude_none=True)
        )


def test_one_rank_has_no_hop():
    ran = simulate(schedules.gpipe(ranks=1, microbatches=2), Costs.uniform(stages=1))
    assert costs_of([ran], schedules.gpipe(ranks=1, microbatches=2)).hop_s == 0


def test_refusals():
    with pytest.raises(CostsError, match="no step was measured"):
        costs_of([], TWO)
    evaluation = timeline((0, "0F0", 0, 1), (1, "1F0", 2, 3))
    with pytest.raises(CostsError, match="stage 0 forward and backward"):
        costs_of([evaluation], TWO)
