"""What Fullbore predicts for a job: stages priced, the schedule simulated, memory summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from jobs import Job

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.cost.hardware import Overlap, Roofline, optimizer_s, reduction_s, stage_costs, step_s
from fullbore.cost.model import Kernels, ModelShape, Piece, Precision, Recompute, Split
from fullbore.cost.model.layer import pieces
from fullbore.ir import Schedule
from fullbore.sim import simulate
from fullbore.timeline import Timeline, live_curves, summarize

__all__ = ["Predicted", "bubble", "predict", "stages_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A step's seconds; GB of the fullest rank, all of it and activations alone."""

    step_s: float
    pipeline_s: float
    memory_gb: float
    activations_gb: float
    costs: Costs


def bubble(job: Job) -> float:
    """The span bubble from a row's own times; 1 and 2 and no hop where it prints none."""
    v = job.virtual_stages
    forward, back, weight, hop = job.measured.profile_s or (1.0, 1.0, 1.0, 0.0)
    costs = Costs.uniform(
        stages=job.ranks * v,
        forward_s=forward / v,
        input_grad_s=back / v,
        weight_grad_s=weight / v,
        hop_s=hop,
    )
    schedule = _schedule(job)
    return summarize(simulate(schedule, costs), schedule).span_bubble_fraction


def predict(job: Job) -> Predicted:
    """Seconds and memory from the model's shape and the cluster's presets alone."""
    stages = stages_of(job)
    roofline = Roofline(
        layout=job.layout,
        precision=job.precision,
        kernels=job.kernels,
        overlap=Overlap(backward=job.tensor_overlap, forward=job.forward_overlap),
    )
    costs = stage_costs(roofline, stages, message_bytes=_message_bytes(job))
    schedule = _schedule(job)
    timeline = simulate(schedule, costs, overlap=job.overlapped)
    pipeline_s = summarize(timeline, schedule).makespan_s
    held = _activation_peaks(timeline, schedule, costs) if job.measured.memory_gb else [0.0]
    fixed = [_state_bytes(job, stages, schedule, rank) for rank in range(job.ranks)]
    return Predicted(
        step_s=_step_s(job, stages, schedule, pipeline_s),
        pipeline_s=pipeline_s,
        memory_gb=max(a + b for a, b in zip(held, fixed, strict=False)) / 1e9,
        activations_gb=max(held) / 1e9,
        costs=costs,
    )


@cache
def _named(name: str, ranks: int, microbatches: int, virtual_stages: int | None) -> Schedule:
    return schedules.build(
        name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages
    )


def _schedule(job: Job) -> Schedule:
    v = job.virtual_stages
    return _named(job.schedule, job.ranks, job.microbatches, v if v > 1 else None)


@cache
def _pieces(
    shape: ModelShape,
    split: Split,
    sequence: int,
    microbatch: int,
    recompute: Recompute,
    precision: Precision,
    kernels: Kernels,
) -> tuple[Piece, ...]:
    return pieces(
        shape,
        split,
        sequence=sequence,
        microbatch=microbatch,
        recompute=recompute,
        precision=precision,
        causal=kernels.flash,
        kernels=kernels,
    )


def stages_of(job: Job) -> list[list[Piece]]:
    """Layers in nearly equal stages; where they do not divide, both ends count as a layer."""
    made = _pieces(
        job.shape,
        job.split,
        job.sequence,
        job.microbatch,
        job.recompute,
        job.precision,
        job.kernels,
    )
    first, *layers, last = (_spared(piece, job.spares) for piece in made)
    count = job.ranks * job.virtual_stages
    slots: list[list[Piece]] = [[piece] for piece in layers]
    if len(layers) % count:
        slots = [[], *slots, []]
    ends = [round(len(slots) * stage / count) for stage in range(count + 1)]
    stages = [
        [piece for slot in slots[start:end] for piece in slot] for start, end in pairwise(ends)
    ]
    stages[0].insert(0, first)
    stages[-1].append(last)
    return stages


def _spared(piece: Piece, spares: Sequence[str]) -> Piece:
    if not spares:
        return piece
    kept = tuple(tensor for tensor in piece.kept if not any(name in tensor.name for name in spares))
    return replace(piece, kept=kept)


def _message_bytes(job: Job) -> float:
    """s·b·h 16-bit numbers; tensor-parallel ranks share one message between them."""
    tokens = job.sequence * job.microbatch / job.split.context
    return 2.0 * tokens * job.shape.hidden / job.split.tensor


def _activation_peaks(timeline: Timeline, schedule: Schedule, costs: Costs) -> list[float]:
    """Bytes on each rank when it holds most."""
    curves = live_curves(
        timeline,
        schedule,
        held_after_forward=[stage.activation_bytes or 0.0 for stage in costs.stages],
        held_after_input_grad=[stage.input_grad_held_bytes or 0.0 for stage in costs.stages],
        held_before_recompute=[None for _ in costs.stages],
        leaves_at_offload=[None for _ in costs.stages],
    )
    return [curve.peak for curve in curves]


def _parameters(stages: Sequence[Sequence[Piece]], schedule: Schedule, rank: int) -> float:
    mine = schedule.placement.stages_of(rank)
    return sum(piece.parameters for stage in mine for piece in stages[stage])


def _state_bytes(
    job: Job, stages: Sequence[Sequence[Piece]], schedule: Schedule, rank: int
) -> float:
    """Weights, gradients, main weights and moments."""
    held = job.precision
    each = held.weight + held.gradient + held.main_weight + held.moments
    return _parameters(stages, schedule, rank) * each


def _step_s(
    job: Job, stages: Sequence[Sequence[Piece]], schedule: Schedule, pipeline_s: float
) -> float:
    """With gradients summed over replicas and the optimizer, on the rank that has most to do."""
    most = max(_parameters(stages, schedule, rank) for rank in range(job.ranks))
    shards = job.layout.ring("gradient").size if job.distributed else 1
    summed_s = 0.0
    if not job.hides_reduction:
        summed_s = reduction_s(job.layout, job.precision, dense=most)
    return step_s(
        job.layout,
        pipeline_s=pipeline_s,
        reduction_s=summed_s,
        optimizer_s=optimizer_s(job.layout, job.precision, parameters=most, shards=shards),
    )
