"""The options that several commands share; flags have Megatron's names, with short aliases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "JOB",
    "OFFLOAD",
    "OFFLOAD_AHEAD",
    "SLICES",
    "BackwardSeconds",
    "Cluster",
    "CostsFile",
    "ForwardSeconds",
    "GroupSize",
    "HopSeconds",
    "InputGradSeconds",
    "JsonFlag",
    "Microbatches",
    "Offload",
    "OffloadAhead",
    "OffloadSeconds",
    "OverlapFlag",
    "Ranks",
    "ScheduleName",
    "Slices",
    "VirtualStages",
    "WeightGradSeconds",
]

JOB = "The job"
_SHAPE = "Schedule"
_COSTS = "Costs, in seconds of one stage and one microbatch"

ScheduleName = Annotated[
    str,
    typer.Argument(
        metavar="SCHEDULE",
        help="A name that `fullbore schedules` lists, or a CSV file in PyTorch's format.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--pipeline-model-parallel-size",
        "-p",
        metavar="P",
        help="Pipeline ranks; a CSV file says them itself.",
        rich_help_panel=_SHAPE,
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option(
        "--num-microbatches",
        "-m",
        metavar="M",
        help="Microbatches a step; a CSV file says them itself.",
        rich_help_panel=_SHAPE,
    ),
]
VirtualStages = Annotated[
    int | None,
    typer.Option(
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual-stages",
        "-v",
        metavar="V",
        help="Stages a rank, for interleaved and looped schedules.",
        rich_help_panel=_SHAPE,
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "-g",
        metavar="G",
        help="Microbatches that a stage of an interleaved schedule takes in a row, by default P.",
        rich_help_panel=_SHAPE,
    ),
]
SLICES = "Slices of each sequence, for seq1f1b; 4 if not given."
Slices = Annotated[
    int | None,
    typer.Option(
        "--slices",
        metavar="K",
        help=SLICES,
        rich_help_panel=_SHAPE,
    ),
]
OFFLOAD = "Let activations leave for the host that are then away for N actions at least."
OFFLOAD_AHEAD = "How many actions ahead of their backward they begin to come back, 1 if not given."
Offload = Annotated[
    int | None,
    typer.Option("--offload", metavar="N", min=1, help=OFFLOAD, rich_help_panel=_SHAPE),
]
OffloadAhead = Annotated[
    int | None,
    typer.Option("--offload-ahead", metavar="K", min=0, help=OFFLOAD_AHEAD, rich_help_panel=_SHAPE),
]
ForwardSeconds = Annotated[
    float | None,
    typer.Option(
        "--forward-s",
        metavar="S",
        help="Forward, 1 if not given.",
        rich_help_panel=_COSTS,
    ),
]
BackwardSeconds = Annotated[
    float | None,
    typer.Option(
        "--backward-s",
        metavar="S",
        help="Whole backward, 2 if not given.",
        rich_help_panel=_COSTS,
    ),
]
InputGradSeconds = Annotated[
    float | None,
    typer.Option(
        "--input-grad-s",
        metavar="S",
        help="Input-gradient half of the backward; instead of --backward-s.",
        rich_help_panel=_COSTS,
    ),
]
WeightGradSeconds = Annotated[
    float | None,
    typer.Option(
        "--weight-grad-s",
        metavar="S",
        help="Weight-gradient half of the backward; instead of --backward-s.",
        rich_help_panel=_COSTS,
    ),
]
HopSeconds = Annotated[
    float | None,
    typer.Option(
        "--hop-s",
        metavar="S",
        help="Latency of a message between two ranks, 0 if not given.",
        rich_help_panel=_COSTS,
    ),
]
OffloadSeconds = Annotated[
    float | None,
    typer.Option(
        "--offload-s",
        metavar="S",
        help="Copy of a stage's activations to the host, and as long back.",
        rich_help_panel=_COSTS,
    ),
]
CostsFile = Annotated[
    Path | None,
    typer.Option(
        "--costs",
        metavar="FILE",
        help="A JSON file with the costs of each stage, instead of the flags above.",
        rich_help_panel=_COSTS,
    ),
]
OverlapFlag = Annotated[
    bool,
    typer.Option(
        "--overlap/--no-overlap",
        help="Whether ranks compute while their messages travel.",
        rich_help_panel=_COSTS,
    ),
]
JsonFlag = Annotated[
    bool,
    typer.Option("--json", help="Print JSON with documented keys (docs/json.md) and nothing else."),
]

Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Devices: h100:8x8 (nodes x GPUs a node), h100:64, or a TOML file.",
        rich_help_panel=JOB,
    ),
]
