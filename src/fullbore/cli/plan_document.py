"""A plan as JSON (docs/json.md)."""

from __future__ import annotations

from dataclasses import asdict

from fullbore.cli.plan_tables import flags
from fullbore.plan import Evaluated
from fullbore.plan.choice import recompute_name
from fullbore.plan.figures import Figures
from fullbore.plan.findings import Findings
from fullbore.plan.question import Borrowed

__all__ = ["document", "of_one"]

_NOTHING = Borrowed()


def document(findings: Findings) -> dict[str, object]:
    """Every figure, unrounded; lists by rank have one entry a rank."""
    plan, memory, idle = findings.plan, findings.memory, findings.idle
    question = plan.question
    return {
        "model": question.shape.name,
        "cluster": question.cluster.name,
        "devices": question.cluster.size,
        "global_batch_size": question.global_batch,
        "seq_length": question.sequence,
        "precision": question.precision.name,
        "causal": question.causal,
        "memory_limit_bytes": question.limit_bytes,
        "taken_from_model": list(question.borrowed.taken),
        "complete": plan.complete,
        "spreads": plan.counts.spreads,
        "spreads_pruned": plan.counts.spreads_pruned,
        "candidates": plan.counts.candidates,
        "simulated": plan.counts.simulated,
        "too_large": plan.counts.too_large,
        "pruned": plan.counts.pruned,
        "simulations": plan.counts.simulations,
        "plans": [
            of_one(one, figures, question.borrowed)
            for one, figures in zip(plan.best, findings.figures, strict=True)
        ],
        "step_parts": asdict(findings.parts),
        "parameter_bytes": memory.parameters.tolist(),
        "gradient_bytes": memory.gradients.tolist(),
        "optimizer_bytes": memory.optimizer.tolist(),
        "activation_bytes": memory.activations.tolist(),
        "logits_bytes": memory.logits.tolist(),
        "buffer_bytes": memory.buffers.tolist(),
        "allowance_bytes": memory.allowance.tolist(),
        "total_bytes": memory.total.tolist(),
        "busy_s": idle.busy_s.tolist(),
        "warmup_idle_s": idle.warmup_s.tolist(),
        "steady_idle_s": idle.steady_s.tolist(),
        "cooldown_idle_s": idle.cooldown_s.tolist(),
        "imbalance_idle_s": idle.imbalance_s.tolist(),
        "communication_idle_s": idle.communication_s.tolist(),
        "neighbours": [
            {
                "change": one.change,
                "reason": one.reason,
                "fits": None if one.evaluated is None else one.evaluated.fits,
                "step_s": None if one.evaluated is None else one.evaluated.step_s,
                "peak_bytes": None if one.evaluated is None else one.evaluated.peak_bytes,
                "slower": one.slower,
            }
            for one in findings.neighbours
        ],
        "front": [_choice(one, question.borrowed) for one in plan.front],
    }


def of_one(one: Evaluated, figures: Figures, borrowed: Borrowed = _NOTHING) -> dict[str, object]:
    """A plan with its rates. borrowed: as of `flags`."""
    return {**_choice(one, borrowed), **asdict(figures)}


def _choice(one: Evaluated, borrowed: Borrowed) -> dict[str, object]:
    choice, spread = one.choice, one.choice.spread
    return {
        "pipeline_model_parallel_size": spread.pipeline,
        "tensor_model_parallel_size": spread.tensor,
        "context_parallel_size": spread.context,
        "expert_model_parallel_size": spread.expert,
        "data_parallel_size": spread.data,
        "micro_batch_size": spread.microbatch_size,
        "num_microbatches": spread.microbatches,
        "sequence_parallel": spread.sequence_parallel,
        "use_distributed_optimizer": spread.distributed,
        "schedule": choice.schedule,
        "virtual_stages": choice.virtual_stages,
        "group_size": choice.group,
        "stage_layers": list(choice.layers or ()),
        "recompute": recompute_name(choice.recompute),
        "step_s": one.step_s,
        "peak_bytes": one.peak_bytes,
        "worst_rank": one.worst_rank,
        "flags": flags(choice, borrowed),
    }
