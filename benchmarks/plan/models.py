"""What `fullbore plan` says of well-known models: a line each, with the time that it took.

python benchmarks/plan/models.py [NAME ...]

Every line is one run of the command as a user would type it (`--verbose` prints it), alone in its
own process; its time is that of the whole command, Python's start included, and CPU what it had of
a core, which is the time on a machine with nothing else to do. Experts are spread and
sizes that would make the question a search of days are fixed as the command says; everything else
is chosen. bubble: of the schedule alone, idle / total; memory: of the fullest rank, allowance
included; MFU: the causal half of attention counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullbore.cli.output import table

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One command: a model of examples/configs, a cluster, a batch, and what is not left open."""

    model: str
    cluster: str
    batch: int
    sequence: int
    more: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """As typed after `fullbore plan`."""
        return [
            *("--model", f"examples/configs/{self.model}", "--cluster", self.cluster),
            *("--global-batch-size", str(self.batch), "--seq-length", str(self.sequence)),
            *self.more,
        ]


_EXPERTS = ("--expert-tensor-parallel-size", "1", "--expert-model-parallel-size")
RUNS = (
    Run(model="llama3-8b", cluster="h100:1x8", batch=128, sequence=8192),
    Run(model="llama3-70b", cluster="h100:8x8", batch=128, sequence=8192),
    Run(model="llama3-405b", cluster="h100:64x8", batch=512, sequence=8192),
    Run(model="qwen2.5-72b", cluster="h100:8x8", batch=256, sequence=4096),
    Run(
        model="qwen3-235b-a22b",
        cluster="h100:32x8",
        batch=2048,
        sequence=4096,
        more=(*_EXPERTS, "4,8,16,32", "--micro-batch-size", "1,2"),
    ),
    Run(
        model="mixtral-8x7b",
        cluster="h100:8x8",
        batch=256,
        sequence=4096,
        more=(*_EXPERTS, "1,2,4,8"),
    ),
    Run(
        model="deepseek-v3",
        cluster="h100:256x8",
        batch=15360,
        sequence=4096,
        more=(*_EXPERTS, "8,16,32,64", "--micro-batch-size", "1", "--precision", "fp8"),
    ),
    Run(
        model="gpt3-175b.sh",
        cluster="a100:128x8",
        batch=1536,
        sequence=2048,
        more=(
            *("--pipeline-model-parallel-size", "any", "--tensor-model-parallel-size", "any"),
            *("--micro-batch-size", "any"),
        ),
    ),
)


def main() -> None:
    """Print the table."""
    args = arguments()
    chosen = [run for run in RUNS if not args.names or run.model in args.names]
    print(f"{platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}\n")
    rows = []
    for run in chosen:
        if args.verbose:
            print("fullbore plan", *run.arguments, file=sys.stderr)
        begin_s, begin_cpu_s = time.perf_counter(), children_s()
        found = planned(run)
        spent_s, cpu_s = time.perf_counter() - begin_s, children_s() - begin_cpu_s
        rows.append(line(run, found, spent_s=spent_s, cpu_s=cpu_s))
    print(table(COLUMNS, rows))


def children_s() -> float:
    """CPU seconds of all commands that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [run.model for run in RUNS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all")
    parser.add_argument("--verbose", action="store_true", help="print each command")
    args = parser.parse_args()
    for name in args.names:
        if name not in known:
            parser.error(f"no model {name}: {', '.join(known)}")
    return args


def planned(run: Run) -> dict[str, Any]:
    """The command's JSON."""
    command = [sys.executable, "-m", "fullbore", "plan", *run.arguments, "--top", "3", "--json"]
    made = subprocess.run(
        command, cwd=CONFIGS.parents[1], capture_output=True, text=True, check=False
    )
    if made.returncode:
        sys.exit(f"{' '.join(command)}\n{made.stderr}")
    found: dict[str, Any] = json.loads(made.stdout)
    return found


COLUMNS = (
    *(
        "model",
        "cluster",
        "GBS",
        "seq",
        "candidates",
        "simulated",
        "time",
        "CPU",
        "P",
        "v",
        "TP",
        "DP",
    ),
    *("EP", "MBS", "schedule", "recompute", "bubble", "memory", "MFU", "step"),
)


def line(run: Run, found: dict[str, Any], *, spent_s: float, cpu_s: float) -> list[str]:
    """The winner in one row."""
    best, parts = found["plans"][0], found["step_parts"]
    busy_s = sum(parts[name] for name in ("compute_s", "recompute_s", "exposed_s"))
    return [
        run.model.removesuffix(".sh"),
        run.cluster,
        str(run.batch),
        str(run.sequence),
        f"{found['candidates']:,}",
        f"{found['simulations']:,}",
        f"{spent_s:.1f} s",
        f"{cpu_s:.1f} s",
        str(best["pipeline_model_parallel_size"]),
        str(best["virtual_stages"]),
        str(best["tensor_model_parallel_size"]),
        str(best["data_parallel_size"]),
        str(best["expert_model_parallel_size"]),
        str(best["micro_batch_size"]),
        best["schedule"],
        best["recompute"],
        f"{parts['bubble_s'] / (parts['bubble_s'] + busy_s):.1%}",
        f"{best['peak_bytes'] / 2**30:.1f} GiB",
        f"{best['mfu']:.1%}",
        f"{best['step_s']:.2f} s",
    ]


if __name__ == "__main__":
    main()
