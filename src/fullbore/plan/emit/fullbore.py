"""A plan as a script that starts `fullbore train` with it."""

from __future__ import annotations

import shlex

from fullbore.plan.emit.job import (
    HERE,
    SCHEDULE_FILE,
    Job,
    Launch,
    LaunchFile,
    array,
    comment,
    found_files,
    save_interval,
    slug,
    torchrun,
)
from fullbore.plan.engines import check, engine_of
from fullbore.schedules import FAMILIES

__all__ = ["fullbore_arguments", "fullbore_launch"]


def fullbore_launch(job: Job) -> Launch:
    """The script and, where the schedule was found, its file.

    Raises ConfigError that names what Fullbore's engine cannot do.
    """
    script = LaunchFile(name="fullbore.sh", text=_script(job))
    return Launch(
        files=(script, *found_files(job)),
        needs=(
            ("MODEL", "the model's folder, with its tokenizer"),
            ("DATA", "text to train on"),
            ("SAVE", "where checkpoints go; a run that is found there goes on"),
        ),
        ranks="[-]u -m fullbore train",
    )


def fullbore_arguments(job: Job) -> list[str]:
    """The flags of `fullbore train` that the plan decides, one with its values a line.

    A schedule that was found is named as a file beside the script, in the shell's `$here`.
    """
    question, choice, spread = job.question, job.choice, job.choice.spread
    check(engine_of("fullbore"), question, choice)
    return [
        f"--pipeline-model-parallel-size {spread.pipeline}",
        f"--data-parallel-size {spread.data}",
        *_schedule(job),
        *_recompute(job),
        f"--micro-batch-size {spread.microbatch_size}",
        f"--global-batch-size {question.global_batch}",
        f"--seq-length {question.sequence}",
        *(["--use-distributed-optimizer"] if spread.distributed else []),
        *([] if question.overlap_messages else ["--no-overlap-p2p-communication"]),
        "--bf16" if question.precision.name == "bf16" else "--fp32",
    ]


def _schedule(job: Job) -> list[str]:
    choice = job.choice
    assert choice.layers is not None
    layers = f"--stage-layers '{','.join(map(str, choice.layers))}'"
    if job.is_found:
        return [f'--schedule "$here/{SCHEDULE_FILE}"', layers]
    told = [f"--schedule {choice.schedule}"]
    family = next(family for family in FAMILIES if family.name == choice.schedule)
    if family.takes_virtual_stages:
        told.append(f"--num-virtual-stages-per-pipeline-rank {choice.virtual_stages}")
    if choice.group is not None:
        told.append(f"--microbatch-group-size-per-virtual-pipeline-stage {choice.group}")
    return [*told, layers]


def _recompute(job: Job) -> list[str]:
    again = job.choice.recompute
    if again.granularity == "none":
        return []
    return ["--recompute full" if again.layers is None else f"--recompute {again.layers}"]


def _script(job: Job) -> str:
    program = (
        '-m fullbore train --model "$MODEL" --data "$DATA" --save "$SAVE" '
        '"${RESUME[@]}" \\\n  "${PLAN_ARGS[@]}" "$@"'
    )
    return (
        "#!/usr/bin/env bash\n"
        + comment((*job.head, "", *_usage(job)))
        + "set -euo pipefail\n"
        + (HERE if job.is_found else "")
        + _variables(job)
        + array("PLAN_ARGS", fullbore_arguments(job))
        + _run(job)
        + torchrun(job, program)
    )


def _usage(job: Job) -> tuple[str, ...]:
    nodes = job.question.cluster.nodes
    start = "bash fullbore.sh" if nodes == 1 else "HEAD=first-node bash fullbore.sh"
    where = "" if nodes == 1 else f" on each of the {nodes} nodes"
    return (
        f"Start it{where}: {start}, with more flags of fullbore train",
        "MODEL, DATA and SAVE of the environment say which model, text and folder.",
    )


def _variables(job: Job) -> str:
    """The model, the text and the folder, each as the environment has it or as planned."""
    model = 'MODEL="${MODEL:?the folder of the model, with its tokenizer}"\n'
    if job.model is not None:
        model = f'if [ -z "${{MODEL:-}}" ]; then MODEL={shlex.quote(job.model)}; fi\n'
    return (
        model
        + 'DATA="${DATA:-stdlib}" # the library of Python itself, to try it out\n'
        + f'SAVE="${{SAVE:-runs/{slug(job)}}}"\n'
    )


def _run(job: Job) -> str:
    begin = "PLAN_ARGS+=(--from-scratch) # there are no weights beside the configuration\n"
    return (
        (begin if job.from_scratch else "")
        + f"PLAN_ARGS+=(--save-interval {save_interval(job)}) # every half hour or so\n"
        + 'RESUME=()\nif [ -e "$SAVE/latest" ]; then RESUME=(--load "$SAVE"); fi\n\n'
    )
