"""Rows of published tables as jobs: which model ran how on what, and what was measured."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shapes import GPT, Gpt

from fullbore.cost.hardware import Cluster, Layout
from fullbore.cost.model import Kernels, Recompute, Split

__all__ = ["Job", "Measured", "jobs"]

HERE = Path(__file__).parent

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
    hides_reduction: whether gradients are summed beside the backward. spares: names of kept
    tensors that the run computed again besides `recompute`.
    """

    table: str
    model: str
    gpt: Gpt
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
    overlapped: bool
    tensor_overlap: bool
    hides_reduction: bool
    spares: tuple[str, ...]
    measured: Measured

    @property
    def name(self) -> str:
        """For a line of a table."""
        full = "" if self.recompute.granularity == "none" else f", {self.recompute.granularity}"
        size = f"P={self.ranks} M={self.microbatches}"
        return f"{self.model} {self.printed} {size}{full}"

    @property
    def sequences(self) -> int:
        """Of a step of all replicas."""
        return self.microbatch * self.microbatches * self.layout.data


def jobs() -> Iterator[Job]:
    """Every row that can be predicted, and for Korthikanti's both runs of it."""
    for file in ("published.csv", "others.csv"):
        with (HERE / file).open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                yield from _jobs(row)


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
    microbatch = {"1.5B": 6, "14.6B": 1}[row["model"]]
    found = re.search(r"throughput ([\d.]+) samples", row["notes"])
    ranks, microbatches = int(row["P"]), int(row["M"])
    step_s = microbatch * microbatches / ranks / float(found[1]) if found else None
    times = [float(row[name]) / 1e3 for name in ("TF", "TB", "TW", "Tcomm")]
    return _job(
        row,
        "Zero bubble, Tables 4, 5, 9",
        microbatch=microbatch,
        measured=Measured(
            bubble=row["bubble_all_hops"] or row["bubble"],
            profile_s=(times[0], times[1], times[2], times[3]),
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
        gpt=gpt,
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
        overlapped=overlapped,
        tensor_overlap=tensor_overlap,
        hides_reduction=hides_reduction,
        spares=spares,
        measured=measured,
    )


def _sizes(notes: str) -> dict[str, int]:
    """TP=8 DP=24 GPUs=1536 ... as a mapping."""
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", notes)}
