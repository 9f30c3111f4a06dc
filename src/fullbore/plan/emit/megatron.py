"""A plan as Megatron-LM's arguments: everything but the model and its data.

An uneven split becomes a `--pipeline-model-parallel-layout`, such as `Ett|(ttt|)*6ttL`: E the
embedding, t a layer, L the loss, a bar between stages. Source: Megatron Core,
`transformer/pipeline_parallel_layer_layout.py`, and `megatron/training/arguments.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fullbore.cost.model import CORE
from fullbore.plan.choice import Choice
from fullbore.plan.emit.job import (
    Job,
    Launch,
    LaunchFile,
    array,
    comment,
    save_interval,
    slug,
    torchrun,
)
from fullbore.plan.engines import check, engine_of
from fullbore.plan.question import Question

__all__ = ["layout", "megatron_arguments", "megatron_launch"]


def megatron_launch(job: Job) -> Launch:
    """A script that can be sourced for its array, or started; raises as `megatron_arguments`."""
    return Launch(
        files=(LaunchFile(name="megatron.sh", text=_script(job)),),
        needs=(
            ("PRETRAIN", "Megatron-LM's pretrain_gpt.py"),
            ("SAVE", "where checkpoints go; a run that is found there goes on"),
        ),
        ranks="[-]u [^ ]*pretrain_[a-z]*[.]py",
    )


def _script(job: Job) -> str:
    start = "" if job.question.cluster.nodes == 1 else "HEAD=first-node "
    usage = (
        'Source this for its array, and start: torchrun ... pretrain_gpt.py "${MODEL_ARGS[@]}" '
        '"${PLAN_ARGS[@]}"',
        f"or run it on every node: {start}bash megatron.sh and the model's and the data's flags",
    )
    saving = (
        f'--exit-signal-handler --save "$SAVE" --load "$SAVE" --save-interval {save_interval(job)}'
    )
    program = f'"${{PRETRAIN:-pretrain_gpt.py}}" "$@" "${{PLAN_ARGS[@]}}" \\\n  {saving}'
    return (
        "#!/usr/bin/env bash\n"
        + comment((*job.head, "", *usage))
        + array("PLAN_ARGS", megatron_arguments(job.question, job.choice))
        + '\nif [ "${BASH_SOURCE[0]}" != "$0" ]; then return 0; fi # sourced\n'
        + f'set -euo pipefail\nSAVE="${{SAVE:-runs/{slug(job)}}}"\n'
        + torchrun(job, program)
    )


def megatron_arguments(question: Question, choice: Choice) -> list[str]:
    """One flag with its values a line, quoted for a shell.

    Raises ConfigError where Megatron-LM has no such schedule, or refuses its numbers.
    """
    check(engine_of("megatron"), question, choice)
    spread = choice.spread
    told = [
        f"--pipeline-model-parallel-size {spread.pipeline}",
        f"--tensor-model-parallel-size {spread.tensor}",
        f"--context-parallel-size {spread.context}",
        *_experts(choice),
        f"--micro-batch-size {spread.microbatch_size}",
        f"--global-batch-size {question.global_batch}",
        f"--seq-length {question.sequence}",
        *_stages(question, choice),
        *_recompute(choice),
        *_switches(question, choice),
        *question.borrowed.optimizer,
    ]
    return told


def layout(layers: Sequence[int], further: int = 0) -> str:
    """Layers of stages in Megatron's notation; further: layers of multi-token prediction."""
    last = len(layers) - 1
    stages = [
        ("E" if at == 0 else "") + "t" * number + ("m" * further + "L" if at == last else "")
        for at, number in enumerate(layers)
    ]
    told = []
    for stage, alike in groupby(stages):
        count = len(list(alike))
        told.append(f"({stage}|)*{count}" if count > 1 else f"{stage}|")
    return "".join(told).removesuffix("|")


def _experts(choice: Choice) -> list[str]:
    spread = choice.spread
    if spread.expert == 1 and spread.expert_tensor is None:
        return []
    return [
        f"--expert-model-parallel-size {spread.expert}",
        f"--expert-tensor-parallel-size {spread.split.width_of_experts}",
    ]


def _stages(question: Question, choice: Choice) -> list[str]:
    """Virtual stages: their number where they are equal, else the layout, which says it too."""
    assert choice.layers is not None
    told = []
    if len(set(choice.layers)) > 1:
        further = question.shape.mtp_layers if question.shape.mtp_counted else 0
        told.append(f"--pipeline-model-parallel-layout '{layout(choice.layers, further)}'")
    elif choice.virtual_stages > 1:
        told.append(f"--num-virtual-stages-per-pipeline-rank {choice.virtual_stages}")
    if choice.group is not None:
        told.append(f"--microbatch-group-size-per-virtual-pipeline-stage {choice.group}")
    return told


def _recompute(choice: Choice) -> list[str]:
    again = choice.recompute
    if again.granularity == "none":
        return []
    told = [f"--recompute-granularity {again.granularity}"]
    if again.modules != CORE:
        told.append(f"--recompute-modules {' '.join(again.modules)}")
    if again.granularity == "full" and again.layers is None:
        told.append("--recompute-method uniform --recompute-num-layers 1")
    elif again.layers is not None:
        told.append(f"--recompute-method block --recompute-num-layers {again.layers}")
    return told


def _switches(question: Question, choice: Choice) -> list[str]:
    spread, precision = choice.spread, question.precision.name
    pairs = {
        "--sequence-parallel": spread.sequence_parallel,
        "--use-distributed-optimizer": spread.distributed,
        "--overlap-grad-reduce": question.overlap_gradients and spread.data * spread.context > 1,
        "--overlap-param-gather": question.overlap_gradients
        and question.overlap_parameters
        and spread.distributed,
        "--tp-comm-overlap": question.overlap.forward and spread.tensor > 1,
        "--overlap-moe-expert-parallel-comm": question.overlap.expert and spread.expert > 1,
        f"--moe-token-dispatcher-type {question.kernels.dispatcher}": spread.expert > 1,
        f"--cuda-graph-impl {question.capture.implementation}": not question.capture.is_off,
        f"--cuda-graph-modules {' '.join(question.capture.modules)}": question.capture.modules,
        "--no-overlap-p2p-communication": not question.overlap_messages,
        "--use-flash-attn": question.kernels.flash,
        "--bf16": precision == "bf16" or question.precision.is_narrow,
        "--fp16": precision == "fp16",
        "--fp8-format hybrid": question.precision.is_narrow and not question.precision.in_blocks,
        "--fp8-format e4m3 --fp8-recipe mxfp8": question.precision.in_blocks,
        "--fp8-param-gather": precision == "fp8_weights",
    }
    return [flag for flag, given in pairs.items() if given]
