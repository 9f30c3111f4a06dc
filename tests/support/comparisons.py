"""Measurements without processes: the simulator plays the ranks, with costs of its own."""

from __future__ import annotations

from dataclasses import replace

from fullbore import schedules
from fullbore.compare import Measurement, Setting, Training
from fullbore.cost import Costs
from fullbore.ir import Schedule
from fullbore.passes import insert_communication
from fullbore.sim import simulate
from fullbore.timeline import Timeline, live_curves

REST_S = 0.5


def ran(schedule: Schedule, *, slower: float = 1.0) -> Timeline:
    """A step as the ranks would have measured it; backwards of later stages take longer."""
    stages = [
        {"forward_s": slower / schedule.stages, "backward_s": slower * (2 + s) / schedule.stages}
        for s in range(schedule.stages)
    ]
    costs = Costs.parse({"stages": stages, "hop_s": 0.01, "overhead_s": 0.002})
    return replace(simulate(insert_communication(schedule), costs), source="measured")


def measurement(
    name: str, ranks: int, microbatches: int, *, paced: bool = False, **changes: object
) -> Measurement:
    """Three steps of a schedule, the second the median one."""
    schedule = schedules.build(name, ranks=ranks, microbatches=microbatches)
    timelines = tuple(ran(schedule, slower=slower) for slower in (1.5, 1.1, 1.0))
    held = tuple(1000 * (stage + 1) for stage in range(schedule.stages))
    curves = live_curves(timelines[0], schedule, held_after_forward=held)
    training = {
        "losses": (2.5, 2.25, 2.0),
        "held_out_before": 2.75,
        "held_out_after": 2.125,
        "peak_activation_bytes": tuple(int(curve.peak) for curve in curves),
        "stage_activation_bytes": held,
    }
    return Measurement(
        schedule=schedule,
        timelines=timelines,
        step_s=tuple(timeline.makespan_s + REST_S for timeline in timelines),
        **{**({} if paced else training), **changes},
    )


TRAINED = Setting(
    ranks=2,
    microbatches=4,
    steps=4,
    warmup_steps=1,
    overlap=True,
    device="cpu",
    cores=2,
    threads=1,
    message_bytes=4096,
    training=Training(
        model="Tiny, 4 layers",
        text="3 documents",
        tokens=64,
        flops=3e12,
        flops_count="matrices only",
        peak_flops=2e12,
        peak_source="measured",
    ),
)
PACED = replace(TRAINED, ranks=8, training=None, pace="Every stage sleeps")
