"""`fullbore compare`: one job under several schedules, measured and predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullbore.cli import training_options as flags
from fullbore.cli.options import JsonFlag
from fullbore.cli.place import is_under_torchrun
from fullbore.errors import ConfigError

__all__ = ["compare"]

_COMPARISON = "Comparison"
_PACE = "Stages that sleep"
_OWN = ("schedules", "microbatches", "steps", "warmup_steps", "output", "as_json", "config")
_PACED = ("paced", "forward_s", "backward_s", "costs", "message_bytes")


def compare(
    context: typer.Context,
    *,
    schedules: Annotated[
        str,
        flags.option(
            _COMPARISON,
            "--schedules",
            metavar="NAME,...",
            help="Names that `fullbore schedules` lists, or CSV files; the first is the measure "
            "of the others.",
        ),
    ] = "gpipe,1f1b,interleaved",
    steps: Annotated[
        int,
        flags.option(_COMPARISON, "--steps", metavar="N", help="Steps under each schedule."),
    ] = 6,
    warmup_steps: Annotated[
        int,
        flags.option(
            _COMPARISON,
            "--warmup-steps",
            metavar="N",
            help="How many of them, the first ones, are not measured.",
        ),
    ] = 1,
    output: Annotated[
        Path,
        flags.option(
            _COMPARISON,
            "--output",
            "-o",
            metavar="FOLDER",
            help="report.html, report.json and costs-*.json go there.",
        ),
    ] = Path("runs/compare"),
    paced: Annotated[
        bool,
        flags.option(
            _PACE,
            "--paced",
            help="Stages sleep instead of computing; everything else is real.",
        ),
    ] = False,
    forward_s: Annotated[
        float | None,
        flags.option(
            _PACE,
            "--forward-s",
            metavar="S",
            help="Forward of a whole rank and one microbatch, 0.01; a v-th of it a stage.",
        ),
    ] = None,
    backward_s: Annotated[
        float | None,
        flags.option(_PACE, "--backward-s", metavar="S", help="Its backward, twice the forward."),
    ] = None,
    costs: Annotated[
        Path | None,
        flags.option(
            _PACE,
            "--costs",
            metavar="FILE",
            help="Seconds of each stage instead, such as an earlier run measured.",
        ),
    ] = None,
    message_bytes: Annotated[
        int | None,
        flags.option(_PACE, "--message-bytes", metavar="N", help="Of each message, 65536."),
    ] = None,
    model: flags.Model = None,
    data: flags.Data = None,
    from_scratch: flags.FromScratch = None,
    seq_length: flags.SeqLength = None,
    held_out: flags.HeldOut = None,
    pipeline_model_parallel_size: flags.Ranks = None,
    num_virtual_stages_per_pipeline_rank: flags.VirtualStages = None,
    num_layers_per_virtual_pipeline_stage: flags.LayersPerVirtualStage = None,
    microbatch_group_size_per_virtual_pipeline_stage: flags.GroupSize = None,
    slices: flags.Slices = None,
    stage_layers: flags.StageLayers = None,
    decoder_first_pipeline_num_layers: flags.FirstLayers = None,
    decoder_last_pipeline_num_layers: flags.LastLayers = None,
    overlap_p2p_communication: flags.Overlap = None,
    recompute: flags.Recompute = None,
    recompute_granularity: flags.RecomputeGranularity = None,
    recompute_method: flags.RecomputeMethod = None,
    recompute_num_layers: flags.RecomputeLayers = None,
    offload: flags.Offload = None,
    offload_ahead: flags.OffloadAhead = None,
    microbatches: Annotated[
        int | None,
        flags.option(
            flags.STEPS,
            "--num-microbatches",
            "-m",
            metavar="M",
            help="Microbatches a step, instead of --global-batch-size.",
        ),
    ] = None,
    micro_batch_size: flags.MicroBatchSize = None,
    global_batch_size: flags.GlobalBatchSize = None,
    lr: flags.Lr = None,
    min_lr: flags.MinLr = None,
    lr_warmup_iters: flags.LrWarmupIters = None,
    weight_decay: flags.WeightDecay = None,
    clip_grad: flags.ClipGrad = None,
    adam_beta1: flags.AdamBeta1 = None,
    adam_beta2: flags.AdamBeta2 = None,
    adam_eps: flags.AdamEps = None,
    seed: flags.Seed = None,
    bf16: flags.Bf16 = None,
    device: flags.Device = None,
    threads: flags.Threads = None,
    config: flags.Config = None,
    data_cache_path: flags.DataCachePath = None,
    eval_iters: flags.EvalIters = None,
    as_json: JsonFlag = False,
) -> None:
    """Run one job under several schedules: measured beside predicted.

    Every schedule starts from the same weights and sees the same batches, in one set of processes.
    With --paced the stages sleep, so that many ranks can be studied on few cores:
    fullbore compare --paced -p 8 -m 16
    """
    from fullbore.cli.compare_job import Asked, Pace, make_job
    from fullbore.cli.compare_run import run
    from fullbore.train.settings import read_config

    if is_under_torchrun():
        raise ConfigError("fullbore compare starts its ranks itself: run it without torchrun")
    own = (*_OWN, *_PACED)
    typed = {k: v for k, v in context.params.items() if v not in (None, [], ()) and k not in own}
    asked = Asked(
        schedules=tuple(filter(None, (name.strip() for name in schedules.split(",")))),
        typed=typed,
        from_file=read_config(config) if config is not None else {},
        microbatches=microbatches,
        steps=steps,
        warmup_steps=warmup_steps,
        paced=paced,
        pace=Pace(
            forward_s=forward_s, backward_s=backward_s, costs=costs, message_bytes=message_bytes
        ),
        output=output,
    )
    run(make_job(asked), output, as_json=as_json)
