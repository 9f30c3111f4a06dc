"""`fullbore plan --preset 64gpu-80layer`: one job under GPipe, 1F1B, interleaved and the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullbore.cli.figures import counted, percent, seconds
from fullbore.cli.output import print_json, table
from fullbore.cli.plan_run import progress
from fullbore.cli.plan_tables import flags, layers_text
from fullbore.cost.hardware import GIB
from fullbore.errors import ConfigError
from fullbore.plan.choice import recompute_name
from fullbore.plan.job64 import TENSOR, Job, Row, job_of

__all__ = ["PRESET", "show_preset"]

PRESET = "64gpu-80layer"

_CLAIMED = """\
claimed elsewhere, with neither model, sequence nor M: bubble 32.4, 18.2, 6.4 % and activations
68.5, 34.2, 28.6 GB for GPipe, 1F1B and interleaved; 2.25 times GPipe's speed. No M gives them."""


def show_preset(name: str, *, typed: Sequence[str], as_json: bool) -> None:
    """Print the tables of a preset; ConfigError for an unknown one, or other flags beside it.

    typed: all flags that were.
    """
    if name != PRESET:
        raise ConfigError(f"--preset {name}: it must be {PRESET}")
    beside = [flag for flag in typed if flag not in ("--preset", "--json")]
    if beside:
        raise ConfigError(
            f"--preset says everything itself but --json: leave {' and '.join(beside)} out"
        )
    with progress(keeps=False) as tell:
        jobs = [job_of(tensor=tensor, report=tell) for tensor in TENSOR]
    if as_json:
        print_json({"preset": name, "jobs": [_document(job) for job in jobs]})
        return
    print(
        "80 layers shaped as Llama 3 70B, sequences of 4096 tokens, 64 H100 of 80 GiB (8 x 8),\n"
        "P=8, micro-batch size 2, global batch 128, bf16; M follows from the replicas"
    )
    for job in jobs:
        print("", *_lines(job), sep="\n")
    print("", _CLAIMED, sep="\n")


def _lines(job: Job) -> Iterator[str]:
    spread = job.spread
    yield f"M={spread.microbatches}: TP={spread.tensor}, {counted(spread.data, 'replica')}"
    yield table(_HEADER, [_cells(row, job.rows[0]) for row in job.rows])
    best = job.rows[-1].choice
    yield f"best: {flags(best)}; layers {layers_text(best.layers)}"
    yield _bar(job)
    yield f"GPipe as it would have to run, and on to the best: {job.speedup:.2f} times as fast"
    yield table(
        ("one change after another", "step", "times"),
        [(one.change, seconds(one.step_s), f"{one.speedup:.3f}") for one in job.factors],
    )


_HEADER = ("", "bubble", "idle", "activations", "in all", "fits", "step", "change", "MFU")


def _cells(row: Row, first: Row) -> tuple[str, ...]:
    return (
        row.name,
        percent(row.bubble),
        percent(row.idle),
        f"{row.activation_bytes / GIB:.1f} GiB",
        f"{row.total_bytes / GIB:.1f} GiB",
        "yes" if row.fits else "no",
        seconds(row.step_s),
        f"{(row.step_s / first.step_s - 1) * 100:+.1f} %",
        percent(row.mfu),
    )


def _bar(job: Job) -> str:
    first, bar = job.rows[0], job.bar
    if bar is None:
        return (
            "no schedule that fits has a bubble under 6.4 % and under 41.8 % of GPipe's activations"
        )
    share = bar.activation_bytes / first.activation_bytes
    return (
        f"bubble under 6.4 % with under 41.8 % of GPipe's activations: {bar.name}, "
        f"{percent(bar.bubble)} with {percent(share)}"
    )


def _document(job: Job) -> dict[str, object]:
    spread = job.spread
    return {
        "num_microbatches": spread.microbatches,
        "tensor_model_parallel_size": spread.tensor,
        "data_parallel_size": spread.data,
        "rows": [_row(row) for row in job.rows],
        "bar": None if job.bar is None else _row(job.bar),
        "factors": [
            {"change": one.change, "step_s": one.step_s, "speedup": one.speedup}
            for one in job.factors
        ],
        "speedup": job.speedup,
    }


def _row(row: Row) -> dict[str, object]:
    return {
        "name": row.name,
        "schedule": row.choice.schedule,
        "virtual_stages": row.choice.virtual_stages,
        "recompute": recompute_name(row.choice.recompute),
        "bubble_fraction": row.bubble,
        "idle_fraction": row.idle,
        "activation_bytes": row.activation_bytes,
        "total_bytes": row.total_bytes,
        "fits": row.fits,
        "step_s": row.step_s,
        "mfu": row.mfu,
    }
