"""Rows of further tables and reports (elsewhere.csv), none of which anything was fitted to.

What a table leaves open follows from what ran it, named in the column `style`:

2021        Megatron-LM and Megatron-DeepSpeed of that time: attention is not fused, messages block,
            no sequence parallelism, gradients are summed after the backward
2023        Megatron-LM as MegaScale was compared to: sequence parallelism, the core of attention
            computed again, tensor-parallel messages beside the backward
megatron    Megatron Core: fused attention, gradients and messages between stages beside computation
nemo        NVIDIA's own recipes: that, and --tp-comm-overlap
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jobs import FP16, Job, Measured, capture_of, cluster_of, layers_of_text, step_flops_per_token
from shapes import ELSEWHERE

from fullbore.cost.hardware import Cluster, Layout
from fullbore.cost.model import Kernels, ModelShape, Precision, Recompute, Split
from fullbore.cost.model.config import read_config
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.shape import Experts

__all__ = ["elsewhere"]

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "examples" / "configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How what ran a row did what its table does not say."""

    flash: bool
    overlapped: bool
    backward: bool
    forward: bool
    sequence_parallel: bool
    hides_reduction: bool


STYLES = {
    "2021": Style(
        flash=False,
        overlapped=False,
        backward=False,
        forward=False,
        sequence_parallel=False,
        hides_reduction=False,
    ),
    "2023": Style(
        flash=False,
        overlapped=True,
        backward=True,
        forward=False,
        sequence_parallel=True,
        hides_reduction=False,
    ),
    "megatron": Style(
        flash=True,
        overlapped=True,
        backward=True,
        forward=False,
        sequence_parallel=True,
        hides_reduction=True,
    ),
    "nemo": Style(
        flash=True,
        overlapped=True,
        backward=True,
        forward=True,
        sequence_parallel=True,
        hides_reduction=True,
    ),
}


def elsewhere() -> Iterator[Job]:
    """Every row of elsewhere.csv."""
    with (HERE / "elsewhere.csv").open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            yield _job(row)


def _job(row: dict[str, str]) -> Job:
    names = ("gpus", "gbs", "mbs", "sequence", "tp", "pp", "cp", "v")
    sizes, style = {name: int(row[name]) for name in names}, STYLES[row["style"]]
    tensor, ranks, context = sizes["tp"], sizes["pp"], sizes["cp"]
    data = sizes["gpus"] // (tensor * ranks * context)
    shape = _shape(row["model"])
    expert, expert_tensor = int(row["ep"] or 1), int(row["etp"]) if row["etp"] else None
    return Job(
        table=row["source"].partition(",")[0],
        model=row["model"],
        shape=shape,
        precision=FP16 if row["precision"] == "fp16" else Precision.named(row["precision"]),
        schedule="interleaved" if sizes["v"] > 1 else "1f1b",
        printed=f"{row['gpu']} {row['precision']}",
        ranks=ranks,
        virtual_stages=sizes["v"],
        microbatches=sizes["gbs"] // (data * sizes["mbs"]),
        microbatch=sizes["mbs"],
        sequence=sizes["sequence"],
        layout=Layout(
            cluster=_cluster(row, sizes["gpus"]),
            tensor=tensor,
            context=context,
            data=data,
            pipeline=ranks,
            expert=expert,
            expert_tensor=expert_tensor,
        ),
        split=Split(
            tensor=tensor,
            sequence_parallel=tensor > 1 and style.sequence_parallel,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
        ),
        recompute=_recompute(row["recompute"]),
        kernels=Kernels(
            flash=style.flash, dispatcher="flex" if row["dispatcher"] == "flex" else "alltoall"
        ),
        capture=capture_of(row["graph"]),
        overlapped=style.overlapped,
        tensor_overlap=style.backward,
        forward_overlap=style.forward,
        expert_overlap=row["overlap"] == "1",
        hides_reduction=style.hides_reduction,
        distributed=row["style"] != "2021" or "ZeRO-1" in row["also"],
        spares=(),
        measured=Measured(step_s=_step_s(row, shape)),
        gpu=row["gpu"],
        mixture=any(isinstance(layer.mlp, Experts) for layer in shape.layers),
        layers=layers_of_text(row["layers"]),
        note=row["dispatcher"],
    )


def _shape(name: str) -> ModelShape:
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    return shape_of(read_config(CONFIGS / name))


def _cluster(row: dict[str, str], gpus: int) -> Cluster:
    """With what a row says of its own network and memory."""
    cluster = cluster_of(row["gpu"], gpus)
    own = {"network_gb_per_s": row["network_gb_per_s"], "memory_gb_per_s": row["memory_gb_per_s"]}
    given = {name: float(value) for name, value in own.items() if value}
    return replace(cluster, device=cluster.device.model_copy(update=given))


def _recompute(text: str) -> Recompute:
    """full, or modules."""
    if text in ("", "full"):
        return Recompute(granularity="full") if text else Recompute()
    return Recompute().changed("selective", modules=text.split())


def _step_s(row: dict[str, str], shape: ModelShape) -> float:
    """As printed, or from FLOP/s: of the model, with what is computed again where a table of 2021
    counts that."""
    if row["step_s"]:
        return float(row["step_s"])
    sequence = int(row["sequence"])
    flops = step_flops_per_token(shape, sequence, causal=row["style"] != "2021")
    counted = 4 / 3 if row["source"].startswith("Narayanan") else 1.0
    tokens = int(row["gbs"]) * sequence / int(row["gpus"])
    return flops * counted * tokens / (float(row["tflop_per_s_gpu"]) * 1e12)
