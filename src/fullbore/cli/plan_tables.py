"""A plan as text: the winner, runners-up, ranks, seconds, neighbours, memory against time."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from fullbore.cli.figures import counted, percent, seconds
from fullbore.cli.output import table
from fullbore.cost.hardware import GIB
from fullbore.cost.model import CORE
from fullbore.cost.model.shape import Experts
from fullbore.plan import Choice, Question
from fullbore.plan.choice import recompute_name
from fullbore.plan.counts import Counts
from fullbore.plan.findings import Findings
from fullbore.plan.question import Borrowed
from fullbore.view.scatter import Point, scatter_text
from fullbore.view.units import time_unit

__all__ = [
    "Cells",
    "allowance_text",
    "best_cells",
    "conventions",
    "flags",
    "headline",
    "idle_cells",
    "layers_text",
    "memory_cells",
    "neighbour_cells",
    "parts_cells",
    "points",
    "report",
    "taken_text",
    "totals",
]

_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_NOTHING = Borrowed()

Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]

_PARTS = {
    "compute_s": "compute",
    "recompute_s": "recomputation",
    "exposed_s": "messages within stages, exposed",
    "host_s": "waiting for the host to start kernels",
    "bubble_s": "bubble of the schedule",
    "imbalance_s": "imbalance of stages",
    "communication_s": "messages between stages, exposed",
    "reduction_s": "gradients over replicas, exposed",
    "optimizer_s": "optimizer",
    "lost_s": "waiting for the slow, by experience",
}


def report(findings: Findings) -> str:
    """Everything, for a terminal."""
    sections = [
        "\n".join([headline(findings.plan.question), *_taken(findings.plan.question)]),
        "\n".join(_wrapped(title, text) for title, text in totals(findings)),
        _titled("the best plans", best_cells(findings)),
        _titled("memory of each rank, GiB", memory_cells(findings)),
        _titled(f"idle time of each rank, {_unit(findings)}", idle_cells(findings)),
        _titled("where the step goes", parts_cells(findings)),
        _titled("why not otherwise (one change each)", neighbour_cells(findings), left=True),
        scatter_text(points(findings), x="GiB on the fullest rank", y="seconds a step"),
        "\n".join(conventions(findings)),
    ]
    return "\n\n".join(sections)


def _titled(title: str, cells: Cells, *, left: bool = False) -> str:
    if not left:
        return f"{title}\n{table(*cells)}"
    width = max(len(row[0]) for row in cells[1])
    lines = [f"{row[0].ljust(width)}  {row[1]}" for row in cells[1]]
    return "\n".join([title, *lines])


def headline(question: Question) -> str:
    """What was asked."""
    shape, cluster = question.shape, question.cluster
    return (
        f"{shape.name} ({counted(len(shape.layers), 'layer')}, hidden {shape.hidden}) on "
        f"{cluster.name} ({cluster.size} x {cluster.device.title}), {question.global_batch} "
        f"sequences of {question.sequence} tokens a step, {question.precision.name}"
    )


def _taken(question: Question) -> list[str]:
    """Flags that were not typed."""
    return [_wrapped("arguments", taken_text(question))] if question.borrowed.taken else []


def taken_text(question: Question) -> str:
    """Where flags came from that nobody typed."""
    return (
        f"of {question.shape.name} that hold, since no others were typed: "
        f"{' '.join(question.borrowed.taken)}"
    )


def flags(choice: Choice, borrowed: Borrowed = _NOTHING) -> str:
    """The choice as flags of `fullbore plan`, which are Megatron's as far as it has them.

    borrowed: what came with the model, which a flag must contradict that is usually left out.
    """
    spread, said = choice.spread, borrowed.said
    told = [
        f"--pipeline-model-parallel-size {spread.pipeline}",
        f"--tensor-model-parallel-size {spread.tensor}",
    ]
    if spread.tensor > 1:
        told.append(_switch("sequence-parallel", on=spread.sequence_parallel))
    if spread.context > 1 or "--context-parallel-size" in said:
        told.append(f"--context-parallel-size {spread.context}")
    if spread.expert > 1 or "--expert-model-parallel-size" in said:
        told.append(f"--expert-model-parallel-size {spread.expert}")
    if spread.expert_tensor is not None:
        told.append(f"--expert-tensor-parallel-size {spread.expert_tensor}")
    told.append(f"--micro-batch-size {spread.microbatch_size} --schedule {choice.schedule}")
    if choice.virtual_stages > 1 or "--num-virtual-stages-per-pipeline-rank" in said:
        told.append(f"--num-virtual-stages-per-pipeline-rank {choice.virtual_stages}")
    if choice.group is not None and (choice.group != spread.pipeline or _GROUP in said):
        told.append(f"{_GROUP} {choice.group}")
    if choice.layers is not None and (len(set(choice.layers)) > 1 or "--stage-layers" in said):
        told.append(f"--stage-layers {','.join(map(str, choice.layers))}")
    if choice.recompute.granularity != "none" or "--recompute-granularity" in said:
        told.append(f"--recompute-granularity {choice.recompute.granularity}")
    if choice.recompute.modules != CORE:
        told.append(f"--recompute-modules {','.join(choice.recompute.modules)}")
    if choice.recompute.layers is not None:
        told.append(f"--recompute-num-layers {choice.recompute.layers}")
    told.append(_switch("use-distributed-optimizer", on=spread.distributed))
    return " ".join(told)


def _switch(name: str, *, on: bool) -> str:
    return f"--{name}" if on else f"--no-{name}"


def totals(findings: Findings) -> list[tuple[str, str]]:
    """The winner in a few lines, each with its title."""
    winner, figures, question = findings.winner, findings.figures[0], findings.plan.question
    spread, limit = winner.choice.spread, question.limit_bytes
    attention = "causal half of attention" if question.causal else "all of attention"
    return [
        ("best", flags(winner.choice, question.borrowed)),
        (
            "batch",
            f"{counted(spread.data, 'replica')} of {counted(spread.microbatches, 'microbatch')}",
        ),
        ("layers", f"{layers_text(winner.choice.layers)}, stage by stage"),
        ("step", seconds(winner.step_s)),
        (
            "rate",
            f"{figures.tokens_per_s:,.0f} tokens/s, "
            f"{figures.tokens_per_s_per_device:,.0f} tokens/s a device",
        ),
        (
            "MFU",
            f"{percent(figures.mfu)} of the dense peak, {attention} counted; "
            f"HFU {percent(figures.hfu)}",
        ),
        (
            "memory",
            f"{winner.peak_bytes / GIB:.1f} GiB of {limit / GIB:.4g} GiB on rank "
            f"{winner.worst_rank}, the fullest",
        ),
    ]


def _wrapped(title: str, text: str) -> str:
    """A titled line over as many lines as it takes, no flag of it cut."""
    return fill(
        text,
        width=100,
        initial_indent=title.ljust(10),
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )


def layers_text(layers: Sequence[int] | None) -> str:
    """Layers of stages in short: 14 x 5, 6, 4."""
    runs: list[tuple[int, int]] = []
    for number in layers or ():
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0] + 1, number)
        else:
            runs.append((1, number))
    return ", ".join(f"{count} x {number}" if count > 1 else f"{number}" for count, number in runs)


def best_cells(findings: Findings) -> Cells:
    """The winner and the runners-up; columns that say 1 everywhere are left out."""
    ranked = list(zip(findings.plan.best, findings.figures, strict=True))
    columns: dict[str, list[str]] = {
        "": [str(place) for place, _ in enumerate(ranked, start=1)],
        "P": [str(one.choice.spread.pipeline) for one, _ in ranked],
        "TP": [str(one.choice.spread.tensor) for one, _ in ranked],
        "CP": [str(one.choice.spread.context) for one, _ in ranked],
        "EP": [str(one.choice.spread.expert) for one, _ in ranked],
        "DP": [str(one.choice.spread.data) for one, _ in ranked],
        "MBS": [str(one.choice.spread.microbatch_size) for one, _ in ranked],
        "M": [str(one.choice.spread.microbatches) for one, _ in ranked],
        "schedule": [one.choice.schedule for one, _ in ranked],
        "v": [str(one.choice.virtual_stages) for one, _ in ranked],
        "G": [str(one.choice.group or "") for one, _ in ranked],
        "recompute": [recompute_name(one.choice.recompute) for one, _ in ranked],
        "step": [seconds(one.step_s) for one, _ in ranked],
        "slower": [percent(one.step_s / findings.winner.step_s - 1) for one, _ in ranked],
        "tokens/s/GPU": [f"{figures.tokens_per_s_per_device:,.0f}" for _, figures in ranked],
        "MFU": [percent(figures.mfu) for _, figures in ranked],
        "GiB": [f"{one.peak_bytes / GIB:.1f}" for one, _ in ranked],
    }
    for name in ("CP", "EP"):
        if set(columns[name]) == {"1"}:
            del columns[name]
    return tuple(columns), list(zip(*columns.values(), strict=True))


def memory_cells(findings: Findings) -> Cells:
    """The winner's bytes by rank and by what holds them."""
    memory, limit = findings.memory, findings.plan.question.limit_bytes
    columns = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "buffers": memory.buffers,
        "allowance": memory.allowance,
        "total": memory.total,
    }
    rows = [
        (str(rank), *(f"{value / GIB:.2f}" for value in values), percent(values[-1] / limit))
        for rank, values in enumerate(zip(*(c.tolist() for c in columns.values()), strict=True))
    ]
    return ("rank", *columns, f"of {limit / GIB:.4g}"), rows


def idle_cells(findings: Findings) -> Cells:
    """The winner's busy and idle time by rank and cause."""
    idle = findings.idle
    unit = time_unit(findings.winner.step_s)
    columns = {
        "busy": idle.busy_s,
        "warm-up": idle.warmup_s,
        "between": idle.steady_s,
        "cool-down": idle.cooldown_s,
        "imbalance": idle.imbalance_s,
        "communication": idle.communication_s,
    }
    rows = [
        (str(rank), *(unit.number(round(value, 12), digits=4) for value in values))
        for rank, values in enumerate(zip(*(c.tolist() for c in columns.values()), strict=True))
    ]
    return ("rank", *columns), rows


def _unit(findings: Findings) -> str:
    return time_unit(findings.winner.step_s).symbol


def parts_cells(findings: Findings) -> Cells:
    """The winner's step, part by part."""
    total_s = findings.winner.step_s
    rows: list[tuple[str, ...]] = [
        (
            title,
            seconds(getattr(findings.parts, name)),
            percent(getattr(findings.parts, name) / total_s),
        )
        for name, title in _PARTS.items()
    ]
    return ("", "time", "of the step"), rows


def neighbour_cells(findings: Findings) -> Cells:
    """Each neighbour and why it is not the plan."""
    return ("change", "what comes of it"), [(one.change, one.reason) for one in findings.neighbours]


def points(findings: Findings) -> list[Point]:
    """Memory against time: the front, and the plans listed."""
    borrowed = findings.plan.question.borrowed
    front = {id(one) for one in findings.plan.front}
    chosen = {(one.peak_bytes, one.step_s): one for one in findings.plan.best}
    chosen |= {(one.peak_bytes, one.step_s): one for one in findings.plan.front}
    return [
        Point(
            x=one.peak_bytes / GIB,
            y=one.step_s,
            front=id(one) in front,
            label=f"{flags(one.choice, borrowed)}: {one.peak_bytes / GIB:.1f} GiB, "
            f"{seconds(one.step_s)}",
        )
        for one in chosen.values()
    ]


def conventions(findings: Findings) -> list[str]:
    """How the figures are meant, and how much was looked at."""
    plan = findings.plan
    return [
        _looked_at(plan.counts),
        *_whole_experts(plan.question),
        allowance_text(plan.question),
    ]


def _looked_at(counts: Counts) -> str:
    """All numbers add up."""
    number = counts.spreads - counts.spreads_pruned
    told = (
        f"{counts.candidates:,} candidates on {counted(number, 'spread')} of the devices: "
        f"{counts.simulated:,} simulated, {counts.too_large:,} too large, {counts.pruned:,} left "
        "out because of a lower bound on their step"
    )
    if counts.spreads_pruned:
        told += f"; {counted(counts.spreads_pruned, 'more spread')} left out whole"
    further = counts.simulations - counts.simulated
    return f"{told}; {further:,} more simulations to improve the best" if further else told


def _whole_experts(question: Question) -> list[str]:
    """What is not searched unless it is asked for, where it may well help."""
    mixed = any(isinstance(layer.mlp, Experts) for layer in question.shape.layers)
    if not mixed or question.fixed.expert != (1,):
        return []
    return ["experts are spread over ranks only where --expert-model-parallel-size is given"]


def allowance_text(question: Question) -> str:
    """What a bubble, a GiB and the allowance are."""
    allowance = question.allowance
    return (
        "bubble: idle time of a rank while its step lasts; a GiB is 2^30 bytes; allowance: "
        f"{allowance.context_bytes / GIB:.3g} GiB for CUDA and libraries, and "
        f"{percent(allowance.fragmented)} of activations, logits and buffers for fragmentation"
    )
