"""Rows of published tables as jobs: which model ran how on what, and what was measured."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shapes import GPT, RECENT

from fullbore.cost.hardware import Capture, Cluster, Constants, Layout
from fullbore.cost.model import Kernels, ModelShape, Precision, Recompute, Split
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.layer import pieces
from fullbore.cost.model.shape import Experts

__all__ = [
    "Job",
    "Measured",
    "capture_of",
    "cluster_of",
    "jobs",
    "layers_of_text",
    "step_flops_per_token",
]

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "examples" / "configs"

# Megatron-LM sums gradients of --fp16 in 16 bits.
FP16 = replace(Precision.named("fp16"), gradient=2.0)

# Which families of ours a table's names mean. GIS-H's and PO-H's offload are other programs.
SCHEDULES = {
    "none": "1f1b",
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-H1": "zb-h1",
    "ZB-H2": "zb-h2",
    "ZB-1p": "zb-h1",
    "ZB-2p": "zb-h2",
    "GIS": "gis",
    "GIS-H": "gis-h",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a row says; None where it says nothing of the kind.

    bubble: printed, of the longest span of a rank; profile_s: seconds of F, I, W of a rank and of a
    hop that it follows from. step_s: of a step, from throughput or FLOP/s. memory_gb: at its peak,
    all of it or activations alone.
    """

    bubble: str | None = None
    profile_s: tuple[float, float, float, float] | None = None
    step_s: float | None = None
    memory_gb: float | None = None
    activations_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run. overlapped: whether messages between stages travel beside computation.
    hides_reduction: whether gradients are summed beside the backward. distributed: ZeRO-1. spares:
    names of kept tensors that the run computed again besides `recompute`. layers: of each stage,
    where the run's recipe says; nearly equal if not. fits: whether constants are fitted to its
    step. mixture: of experts. note: what else its table says of it.
    """

    table: str
    model: str
    shape: ModelShape
    precision: Precision
    schedule: str
    printed: str
    ranks: int
    virtual_stages: int
    microbatches: int
    microbatch: int
    sequence: int
    layout: Layout
    split: Split
    recompute: Recompute
    kernels: Kernels
    capture: Capture
    overlapped: bool
    tensor_overlap: bool
    forward_overlap: bool
    expert_overlap: bool
    hides_reduction: bool
    distributed: bool
    spares: tuple[str, ...]
    measured: Measured
    gpu: str = "a100"
    fits: bool = False
    mixture: bool = False
    layers: tuple[int, ...] | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """For a line of a table."""
        full = "" if self.recompute.granularity == "none" else f", {self.recompute.granularity}"
        size = f"P={self.ranks} M={self.microbatches}"
        length = f" s={self.sequence}" if self.measured.activations_only else ""
        many = f" on {self.layout.ranks}" if self.gpu != "a100" else ""
        told = f", {self.note}" if self.note else ""
        return f"{self.model} {self.printed} {size}{length}{many}{full}{told}"

    def under(self, constants: Constants) -> Job:
        """The same on devices with other constants."""
        cluster = replace(self.layout.cluster, constants=constants)
        return replace(self, layout=replace(self.layout, cluster=cluster))


def jobs() -> Iterator[Job]:
    """Every row that can be predicted, and for Korthikanti's both runs of it."""
    for file in ("published.csv", "others.csv"):
        for row in _rows(file):
            yield from _jobs(row)
    for file in ("recent.csv", "experts.csv", "later.csv"):
        for row in _rows(file):
            yield _recent(row)


def _rows(file: str) -> list[dict[str, str]]:
    with (HERE / file).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _jobs(row: dict[str, str]) -> Iterator[Job]:
    source = row["source"].partition(" ")[0]
    if source == "ZeroBubble":
        yield _zero_bubble(row)
    elif source == "Narayanan2021":
        yield _narayanan(row)
    elif source == "Korthikanti2022":
        yield from _korthikanti(row)
    elif row["schedule"] in SCHEDULES:
        yield _pipe_offload(row)


def _zero_bubble(row: dict[str, str]) -> Job:
    """A100s in nodes of 8, no tensor or data parallelism, scores and dropout masks kept."""
    microbatch = {"1.5B": 6, "6.2B": 3, "14.6B": 1, "28.3B": 1}[row["model"]]
    found = re.search(r"throughput ([\d.]+) samples", row["notes"])
    ranks, microbatches = int(row["P"]), int(row["M"])
    step_s = microbatch * microbatches / ranks / float(found[1]) if found else None
    times = [float(row[name] or "nan") / 1e3 for name in ("TF", "TB", "TW", "Tcomm")]
    return _job(
        row,
        "Zero bubble, Tables 4, 5, 9",
        microbatch=microbatch,
        measured=Measured(
            bubble=row["bubble_all_hops"] or row["bubble"] or None,
            profile_s=(times[0], times[1], times[2], times[3]) if row["TF"] else None,
            step_s=step_s,
            memory_gb=float(row["mem"]) if row["mem"] else None,
        ),
    )


def _narayanan(row: dict[str, str]) -> Job:
    """Full recomputation; blocking messages; gradients summed after the backward, but for the
    models without a pipeline, which ran under torch's DDP."""
    sizes = _sizes(row["notes"])
    gpt, sequences = GPT[row["model"]], sizes["GBS"]
    found = re.search(r"([\d.]+) TFLOP/s/GPU", row["notes"])
    assert found is not None
    step_s = gpt.recomputed_flops(sequences) / (sizes["GPUs"] * float(found[1]) * 1e12)
    return _job(
        row,
        "Narayanan 2021, Table 1",
        tensor=sizes["TP"],
        data=sizes["DP"],
        microbatch=sizes["MBS"],
        recompute="full",
        overlapped=False,
        tensor_overlap=False,
        hides_reduction=int(row["P"]) == 1,
        measured=Measured(bubble=row["bubble"] or None, step_s=step_s),
    )


def _korthikanti(row: dict[str, str]) -> Iterator[Job]:
    """Sequence parallelism with selective recomputation, and full recomputation without it."""
    sizes = _sizes(row["notes"])
    found = re.search(r"iter ([\d.]+)s \(.*\) vs ([\d.]+)s", row["notes"])
    assert found is not None
    for step_s, what in ((float(found[1]), "selective"), (float(found[2]), "full")):
        yield _job(
            row,
            "Korthikanti 2022, Table 5",
            tensor=sizes["TP"],
            microbatch=sizes["MBS"],
            sequence_parallel=what == "selective",
            recompute=what,
            overlapped=int(row["v"]) > 1,
            measured=Measured(bubble=row["bubble"] or None, step_s=step_s),
        )


def _pipe_offload(row: dict[str, str]) -> Job:
    """Its script computes norms, GELU and dropout again (--recompute-lgd) and fuses attention."""
    found = re.search(r"seq=(\d+)", row["notes"])
    assert found is not None
    measured = Measured(memory_gb=float(row["mem"]), activations_only=True)
    return _job(
        {**row, "M": "16"},
        "PipeOffload, Figure 15",
        microbatch=1,
        flash=True,
        sequence=int(found[1]),
        spares=("attention input", "mlp input", "mlp down input", "dropout mask"),
        measured=measured,
    )


def _recent(row: dict[str, str]) -> Job:
    """As Megatron Core runs on Hopper and Blackwell: flash attention, sequence parallelism beside
    tensor parallelism, its messages beside products both ways, ZeRO-1 beside the pipeline."""
    sizes = {name: int(row[name]) for name in ("gpus", "gbs", "mbs", "tp", "pp", "cp", "v")}
    tensor, ranks, context = sizes["tp"], sizes["pp"], sizes["cp"]
    data = sizes["gpus"] // (tensor * ranks * context)
    shape, sequence = _shape(row["model"]), int(row["sequence"])
    shape = replace(shape, mtp_counted="MTP" in row.get("also", ""))
    mixture = any(isinstance(layer.mlp, Experts) for layer in shape.layers)
    expert, expert_tensor = int(row.get("ep") or "1"), 1 if mixture else None
    cluster = cluster_of(row["gpu"], sizes["gpus"])
    tokens = sizes["gbs"] * sequence / sizes["gpus"]
    per_token = step_flops_per_token(shape, sequence)
    again = (row.get("again") or "").split()
    per_s = float(row["tokens_per_s_gpu"] or float(row["tflop_per_s_gpu"]) * 1e12 / per_token)
    return Job(
        table=row["source"].partition(",")[0],
        model=row["model"],
        shape=shape,
        precision=_precision_of(row),
        schedule="interleaved" if sizes["v"] > 1 else "1f1b",
        printed=f"{row['gpu']} {row['precision']}",
        ranks=ranks,
        virtual_stages=sizes["v"],
        microbatches=sizes["gbs"] // (data * sizes["mbs"]),
        microbatch=sizes["mbs"],
        sequence=sequence,
        layout=Layout(
            cluster=cluster,
            tensor=tensor,
            context=context,
            data=data,
            pipeline=ranks,
            expert=expert,
            expert_tensor=expert_tensor,
        ),
        split=Split(
            tensor=tensor,
            sequence_parallel=tensor > 1,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
        ),
        recompute=Recompute().changed("selective", modules=again) if again else Recompute(),
        kernels=Kernels(
            dispatcher="flex" if row.get("dispatcher") == "flex" else "alltoall",
            dropless=row.get("tokens") != "dropped",
        ),
        capture=capture_of(row.get("graph") or ""),
        overlapped=True,
        tensor_overlap=True,
        forward_overlap=not row["source"].startswith("Llama 3"),  # which does not say so
        expert_overlap=row.get("overlap") == "1",
        hides_reduction=row.get("reduced") != "after",
        distributed=True,
        spares=(),
        measured=Measured(step_s=tokens / per_s),
        gpu=row["gpu"],
        fits=row["used"] == "fit",
        mixture=mixture,
        layers=layers_of_text(row.get("layers") or ""),
        note=", ".join(filter(None, (row.get("tokens", ""), row.get("also", "")))),
    )


def _precision_of(row: dict[str, str]) -> Precision:
    """Megatron Bridge's recipes sum gradients in 16 bits (grad_reduce_in_fp32 = False)."""
    named = Precision.named(row["precision"])
    return replace(named, gradient=2.0) if "Megatron Bridge" in row["source"] else named


def capture_of(text: str) -> Capture:
    """What a row's recipe captured in CUDA graphs: everything, or modules of each layer."""
    if text == "full_iteration":
        return Capture(implementation=text)
    modules = tuple(text.split())
    return Capture(implementation="transformer_engine", modules=modules) if modules else Capture()


def layers_of_text(text: str) -> tuple[int, ...] | None:
    """`4*15 1` is fifteen stages of four layers, then one of one."""
    made: list[int] = []
    for part in text.split():
        each, _, times = part.partition("*")
        made += [int(each)] * int(times or 1)
    return tuple(made) or None


def _shape(name: str) -> ModelShape:
    """A shape of ours, or of a configuration in examples/configs."""
    if name in RECENT:
        return RECENT[name]
    return shape_of(json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8")))


def cluster_of(gpu: str, gpus: int) -> Cluster:
    """A rack of 72 is used by 64 at a time."""
    grouped = f"{gpus // 64}x64" if gpu == "gb200" and gpus >= 64 else str(gpus)
    return Cluster.parse(f"{gpu}:{grouped}")


def step_flops_per_token(shape: ModelShape, sequence: int, *, causal: bool = True) -> float:
    """Of training; causal: the half of attention that the mask hides left out."""
    made = pieces(
        shape,
        Split(),
        sequence=sequence,
        microbatch=1,
        recompute=Recompute(),
        precision=FP16,
        causal=causal,
    )
    return 3 * sum(piece.forward_flops for piece in made) / sequence


def _job(
    row: dict[str, str],
    table: str,
    *,
    microbatch: int,
    measured: Measured,
    tensor: int = 1,
    data: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    flash: bool = False,
    overlapped: bool = True,
    tensor_overlap: bool = True,
    hides_reduction: bool = False,
    sequence: int | None = None,
    spares: tuple[str, ...] = (),
) -> Job:
    gpt, ranks = GPT[row["model"]], int(row["P"])
    cluster = Cluster.parse(f"a100:{tensor * data * ranks}")
    return Job(
        table=table,
        model=row["model"],
        shape=gpt.shape,
        precision=FP16,
        schedule=SCHEDULES[row["schedule"]],
        printed=row["schedule"],
        ranks=ranks,
        virtual_stages=int(row["v"]),
        microbatches=int(row["M"]),
        microbatch=microbatch,
        sequence=sequence or gpt.sequence,
        layout=Layout(cluster=cluster, tensor=tensor, data=data, pipeline=ranks),
        split=Split(tensor=tensor, sequence_parallel=sequence_parallel),
        recompute=Recompute(granularity=recompute),  # type: ignore[arg-type]
        kernels=Kernels(style="fused", flash=flash),
        capture=Capture(),
        overlapped=overlapped,
        tensor_overlap=tensor_overlap,
        forward_overlap=False,
        expert_overlap=False,
        hides_reduction=hides_reduction,
        distributed=False,
        spares=spares,
        measured=measured,
    )


def _sizes(notes: str) -> dict[str, int]:
    """TP=8 DP=24 GPUs=1536 ... as a mapping."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", notes)}
