"""A plan as a job configuration of torchtitan 0.2.2, the last release that reads TOML.

Its stages are lists of modules, its schedules those of torch.distributed.pipelining by name where
they are the same action by action, or else a CSV file that its runtime carries out. Source:
`torchtitan/config/job_config.py`, `distributed/pipeline_parallel.py`, `parallel_dims.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from fullbore.plan.choice import Choice
from fullbore.plan.emit.job import (
    HERE,
    SCHEDULE_FILE,
    Job,
    Launch,
    LaunchFile,
    comment,
    found_files,
    save_interval,
    slug,
    torchrun,
)
from fullbore.plan.emit.torchtitan_models import model_of
from fullbore.plan.engines import check, engine_of

__all__ = ["VERSION", "modules", "schedule_name", "torchtitan_config", "torchtitan_launch"]

VERSION = "0.2.2"

Table = dict[str, object]


def torchtitan_launch(job: Job) -> Launch:
    """The script, the configuration and, where torch has no name for the schedule, its file.

    Raises ConfigError that names what torchtitan cannot do.
    """
    check(engine_of("torchtitan"), job.question, job.choice)
    return Launch(
        files=(
            LaunchFile(name="torchtitan.sh", text=_script(job)),
            LaunchFile(name="torchtitan.toml", text=_toml(job)),
            *found_files(job, needed=_needs_file(job)),
        ),
        needs=(
            ("ASSETS", "the folder with the model's tokenizer"),
            ("SAVE", "where checkpoints go; a run that is found there goes on"),
        ),
    )


def torchtitan_config(job: Job) -> dict[str, Table]:
    """The configuration, section by section."""
    question, spread = job.question, job.choice.spread
    name, flavor = model_of(question.shape)
    is_pipeline = spread.pipeline > 1
    local = spread.microbatches if is_pipeline else 1
    training: Table = {
        "local_batch_size": spread.microbatch_size * local,
        "global_batch_size": question.global_batch,
        "seq_len": question.sequence,
        "mixed_precision_param": "bfloat16" if question.precision.name == "bf16" else "float32",
    }
    return {
        "job": {"description": f"{question.shape.name}, as fullbore plan has it"},
        "model": {"name": name, "flavor": flavor},
        "optimizer": {"name": "AdamW"},
        "training": training,
        "parallelism": {**_parallelism(job), **(_pipeline(job) if is_pipeline else {})},
        "activation_checkpoint": {"mode": job.choice.recompute.granularity},
        "checkpoint": {"enable": True, "interval": save_interval(job)},
    }


def schedule_name(choice: Choice) -> str | None:
    """The name in torch of the very same order of actions; None where it has none."""
    ranks, microbatches = choice.spread.pipeline, choice.spread.microbatches
    match choice.schedule:
        case "gpipe":
            return "GPipe"
        case "1f1b" if microbatches >= ranks:
            return "1F1B"
        case "dualpipe-v" if microbatches >= 2 * ranks:
            return "DualPipeV"
        case "interleaved":
            rounds = max(1, microbatches // ranks)
            theirs = max(ranks, microbatches // rounds)
            if microbatches % rounds == 0 and (choice.group or ranks) == theirs:
                return "Interleaved1F1B"
    return None


def modules(choice: Choice) -> list[list[str]]:
    """The names of each stage's modules, in the model's order."""
    assert choice.layers is not None
    stages: list[list[str]] = []
    first = 0
    for number in choice.layers:
        stages.append([f"layers.{layer}" for layer in range(first, first + number)])
        first += number
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "output"]
    return stages


def _needs_file(job: Job) -> bool:
    return job.choice.spread.pipeline > 1 and schedule_name(job.choice) is None


def _parallelism(job: Job) -> Table:
    spread = job.choice.spread
    told: Table = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": spread.data,
        "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": spread.tensor,
        "context_parallel_degree": spread.context,
    }
    if spread.expert > 1:
        told["expert_parallel_degree"] = spread.expert
        told["expert_tensor_parallel_degree"] = spread.split.width_of_experts
    return told


def _pipeline(job: Job) -> Table:
    choice = job.choice
    told: Table = {
        "pipeline_parallel_degree": choice.spread.pipeline,
        "pipeline_parallel_microbatch_size": choice.spread.microbatch_size,
        "pipeline_parallel_schedule": schedule_name(choice) or _placed_as(job),
        "module_fqns_per_model_part": modules(choice),
    }
    if choice.schedule == "dualpipe-v":
        told["pipeline_parallel_expert_parallel_overlap"] = False
    if _needs_file(job):
        told["pipeline_parallel_schedule_csv"] = SCHEDULE_FILE
    return told


def _placed_as(job: Job) -> str:
    """A schedule that places its stages like a file's: torchtitan asks its name for that alone."""
    homes, ranks = job.schedule.placement.stage_to_rank, job.choice.spread.pipeline
    in_turn = all(home == stage % ranks for stage, home in enumerate(homes))
    return "Interleaved1F1B" if in_turn else "ZBVZeroBubble"


def _toml(job: Job) -> str:
    lines = [
        *job.head,
        "",
        f"For torchtitan {VERSION}. It shards weights and gradients over replicas too, where the",
        "plan counts whole ones.",
        *_model_note(job),
    ]
    sections = [_section(name, table) for name, table in torchtitan_config(job).items()]
    return comment(tuple(lines)) + "\n" + "\n".join(sections)


def _model_note(job: Job) -> list[str]:
    if model_of(job.question.shape)[0] in ("llama3", "qwen3", "deepseek_v3"):
        return []
    return [f"torchtitan {VERSION} has no model of this shape: name the one that you add to it."]


def _section(name: str, table: Mapping[str, object]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: object) -> str:
    """Strings, numbers, switches and lists look in TOML as they do in JSON."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"  {json.dumps(row)},\n" for row in value) + "]"
    return json.dumps(value)


def _script(job: Job) -> str:
    start = "" if job.question.cluster.nodes == 1 else "HEAD=first-node "
    usage = (
        f"Start it on every node: {start}ASSETS=FOLDER bash torchtitan.sh [more of torchtitan's "
        "flags]",
        "ASSETS and SAVE of the environment say where the tokenizer is, and where checkpoints go.",
    )
    program = (
        '-m torchtitan.train --job.config_file "$here/torchtitan.toml" \\\n'
        '  --job.dump_folder "$SAVE" --model.hf_assets_path "$ASSETS" '
    )
    if _needs_file(job):
        program += f'\\\n  --parallelism.pipeline_parallel_schedule_csv "$here/{SCHEDULE_FILE}" '
    return (
        "#!/usr/bin/env bash\n"
        + comment((*job.head, "", *usage))
        + "set -euo pipefail\n"
        + HERE
        + f'SAVE="${{SAVE:-runs/{slug(job)}}}"\n'
        + 'ASSETS="${ASSETS:?the folder with the tokenizer}"\n'
        + torchrun(job, program + '"$@"')
    )
