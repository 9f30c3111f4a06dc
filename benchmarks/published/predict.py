"""What Fullbore predicts for a job: its row given to the planner as a fixed choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from jobs import Job

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.cost.hardware import Overlap
from fullbore.cost.model import Kernels, ModelShape, Piece, Precision, Recompute, Split
from fullbore.cost.model.layer import pieces
from fullbore.ir import Schedule
from fullbore.plan import Choice, Evaluator, Question, Spread
from fullbore.plan.figures import figures
from fullbore.plan.question import Allowance
from fullbore.sim import simulate
from fullbore.timeline import live_curves, summarize

__all__ = [
    "Predicted",
    "activations_gb",
    "bubble",
    "choice_of",
    "predict",
    "question_of",
    "stages_of",
]

# Published peaks are an allocator's: neither CUDA's context nor fragmentation is in them.
ALLOCATED = Allowance(context_bytes=0.0, fragmented=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A step's seconds, its MFU (attention counted as the row's kernels compute it), and GB of
    what the fullest rank has allocated.
    """

    step_s: float
    mfu: float
    memory_gb: float


def predict(job: Job) -> Predicted:
    """What `Evaluator.evaluate` says of the row's own choice."""
    question = question_of(job)
    evaluator = Evaluator(question)
    one = evaluator.evaluate(choice_of(job))
    return Predicted(
        step_s=one.step_s,
        mfu=figures(question, one.choice, step_s=one.step_s).mfu,
        memory_gb=one.peak_bytes / 1e9,
    )


def question_of(job: Job) -> Question:
    """The row as a question: model, cluster, batch and how the run was carried out."""
    return Question(
        shape=job.shape,
        cluster=job.layout.cluster,
        global_batch=job.microbatches * job.microbatch * job.layout.data,
        sequence=job.sequence,
        precision=job.precision,
        kernels=job.kernels,
        allowance=ALLOCATED,
        overlap=Overlap(
            backward=job.tensor_overlap, forward=job.forward_overlap, expert=job.expert_overlap
        ),
        capture=job.capture,
        overlap_messages=job.overlapped,
        overlap_gradients=job.hides_reduction,
        overlap_parameters=job.hides_reduction,
        causal=job.kernels.flash,
    )


def choice_of(job: Job) -> Choice:
    """The row's sizes, schedule and layers; nothing is left for the planner to choose."""
    layout = job.layout
    spread = Spread(
        pipeline=job.ranks,
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
        data=layout.data,
        microbatch_size=job.microbatch,
        microbatches=job.microbatches,
        sequence_parallel=job.split.sequence_parallel,
        distributed=job.distributed,
        expert_tensor=layout.expert_tensor,
    )
    return Choice(
        spread=spread,
        schedule=job.schedule,
        virtual_stages=job.virtual_stages,
        recompute=job.recompute,
        layers=layers_of(job),
    )


def layers_of(job: Job) -> tuple[int, ...]:
    """Layers of each stage, as its recipe says; else nearly equal, and where they do not divide,
    both ends count as a layer.
    """
    if job.layers is not None:
        return job.layers
    count, layers = job.ranks * job.virtual_stages, len(job.shape.layers)
    ends_count = 1 if layers % count else 0
    slots = layers + 2 * ends_count
    ends = [round(slots * stage / count) for stage in range(count + 1)]
    made = [end - start for start, end in pairwise(ends)]
    made[0] -= ends_count
    made[-1] -= ends_count
    return tuple(made)


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


def activations_gb(job: Job) -> float:
    """GB of activations alone, of the rank that holds most, where a run computed again what the
    planner has no name for (`spares`).
    """
    schedule, stages = _schedule(job), stages_of(job)
    uniform = Costs.uniform(stages=len(stages), forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0)
    curves = live_curves(
        simulate(schedule, uniform),
        schedule,
        held_after_forward=[sum(piece.kept_bytes for piece in stage) for stage in stages],
        held_after_input_grad=[sum(piece.held_bytes for piece in stage) for stage in stages],
        held_before_recompute=[None for _ in stages],
        leaves_at_offload=[None for _ in stages],
    )
    return max(curve.peak for curve in curves) / 1e9


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
    """The pieces of each stage, without what the run computed again besides."""
    first, *rest, last = (
        _spared(piece, job.spares)
        for piece in _pieces(
            job.shape,
            job.split,
            job.sequence,
            job.microbatch,
            job.recompute,
            job.precision,
            job.kernels,
        )
    )
    stages, start = [], 0
    for number in layers_of(job):
        stages.append(rest[start : start + number])
        start += number
    stages[0].insert(0, first)
    stages[-1].append(last)
    return stages


def _spared(piece: Piece, spares: Sequence[str]) -> Piece:
    if not spares:
        return piece
    kept = tuple(tensor for tensor in piece.kept if not any(name in tensor.name for name in spares))
    return replace(piece, kept=kept)
