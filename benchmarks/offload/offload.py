"""What offloading activations costs and saves on CPU, beside recomputing them.

python benchmarks/offload/offload.py [--help]

One rank, GPipe (the schedule that keeps most), three residual MLP blocks as its stage. Each variant
has a pipeline of its own; their steps take turns, so that a disturbed machine disturbs all alike.
Memory is what autograd keeps at once, counted by the recorder, and what the process has resident
above what it had before the step (Linux; what its heap has kept free is not counted). The goal: the
same gradients, a step at most 10 % longer, and at most half of the memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

from fullbore.passes import offload
from fullbore.runtime import Pipeline
from fullbore.schedules import gpipe

_MIB = 2**20


class Mlp(nn.Module):
    """A residual block as wide as a small language model's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Variant:
    """A pipeline, and what its steps came to."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.name = name
        self.stage = nn.Sequential(*(Mlp(args.width) for _ in range(3)))
        schedule = gpipe(ranks=1, microbatches=args.microbatches)
        ahead = int(name.split()[-1]) if name.startswith("offload") else None
        self.pipe = Pipeline(
            {0: self.stage},
            schedule if ahead is None else offload(schedule, ahead=ahead),
            nn.functional.mse_loss,
            record=True,
            recompute="full" if name == "recompute" else "none",
            offload_folder=args.folder,
        )
        self.steps_s: list[float] = []
        self.kept_bytes, self.resident_bytes, self.copies_s = 0, 0, 0.0

    def step(self, x: torch.Tensor) -> None:
        before = reset_peak()
        self.stage.zero_grad()
        result = self.pipe.step(x, x)
        assert result.peak_activation_bytes is not None and result.timeline is not None
        self.steps_s.append(result.step_s)
        self.kept_bytes = result.peak_activation_bytes[0]
        self.resident_bytes = max(self.resident_bytes, peak() - before)
        timeline = result.timeline
        self.copies_s = float((timeline.end_s - timeline.start_s)[timeline.is_copy].sum())


def reset_peak() -> int:
    """Resident bytes now; the kernel counts their peak anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)


def main() -> None:
    """Print a row a variant; exit status 1 where the goal is missed."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    parser.add_argument("--width", type=int, default=384, help="(default 384)")
    parser.add_argument("--rows", type=int, default=1024, help="of a microbatch (default 1024)")
    parser.add_argument("--microbatches", type=int, default=8, help="M (default 8)")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps (default 9)")
    parser.add_argument("--folder", help="where the file lies (default: for temporary files)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(args.rows * args.microbatches, args.width)
    names = ("everything kept", "offload, ahead 0", "offload, ahead 1", "recompute")
    variants = [Variant(name, args) for name in names]
    for _ in range(args.rounds + 1):
        for variant in variants:
            variant.step(x)
    first = variants[0]
    print(f"{'':18} {'step ms':>8} {'x':>6} {'kept MiB':>9} {'resident MiB':>13} {'copies ms':>10}")
    for variant in variants:
        step_s, ratio = statistics.median(variant.steps_s[1:]), ratio_to(variant, first)
        print(
            f"{variant.name:18} {step_s * 1e3:8.0f} {ratio:6.3f} {variant.kept_bytes / _MIB:9.1f} "
            f"{variant.resident_bytes / _MIB:13.1f} {variant.copies_s * 1e3:10.1f}"
        )
        variant.pipe.close()
    same = all(
        torch.equal(one.grad, other.grad)
        for variant in variants
        for one, other in zip(first.stage.parameters(), variant.stage.parameters(), strict=True)
        if one.grad is not None and other.grad is not None
    )
    print("gradients are the same" if same else "gradients differ")
    away = variants[2]
    if not same or ratio_to(away, first) > 1.1 or away.kept_bytes > first.kept_bytes / 2:
        sys.exit("the goal is missed")


def ratio_to(variant: Variant, first: Variant) -> float:
    """The median over rounds of one step by the other's."""
    pairs = zip(variant.steps_s[1:], first.steps_s[1:], strict=True)
    return statistics.median(one / other for one, other in pairs)


if __name__ == "__main__":
    main()
