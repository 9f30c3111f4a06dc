"""What cutting sequences into slices costs a stage by itself: bytes kept, and time.

python benchmarks/slices/slices.py [--help]

One rank, so nothing of what slices are for: three middle layers of SmolLM2-135M's shape, drawn
weights, one sequence a step. The pipelines' steps take turns, so that a disturbed machine disturbs
all alike. Bytes are what autograd keeps for the sequence, all its slices together, counted by the
recorder; a slice keeps the keys and values of all tokens before it, so k slices keep more than one.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch.nn import functional

from fullbore.runtime import Pipeline
from fullbore.schedules import seq1f1b
from fullbore.train.anatomy import examine
from fullbore.train.build import build_stage, empty_model
from fullbore.train.stages import parts_of

_MIB = 2**20


def main() -> None:
    """Print a table, a row for each number of slices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = _config()
    x, y = torch.randn(2, 1, args.seq_length, config.hidden_size)
    pipes = {k: _pipeline(config, k) for k in args.slices}
    steps_s: dict[int, list[float]] = {k: [] for k in pipes}
    kept: dict[int, int] = {}
    for _ in range(args.steps + 1):
        for k, pipe in pipes.items():
            result = pipe.step(x, y)
            steps_s[k].append(result.step_s)
            assert result.stage_activation_bytes is not None
            kept[k] = result.stage_activation_bytes[0]
    first = args.slices[0]
    base_s = statistics.median(steps_s[first][1:])
    print("slices  kept, MiB   ratio  step, s   ratio")
    for k in pipes:
        step_s = statistics.median(steps_s[k][1:])
        print(
            f"{k:6} {kept[k] / _MIB:10.1f} {kept[k] / kept[first]:7.2f} {step_s:8.2f} "
            f"{step_s / base_s:7.2f}"
        )


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=5,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )


def _pipeline(config: Any, slices: int) -> Pipeline:
    anatomy = examine(empty_model(config))
    part = parts_of(anatomy, (1, 3, 1))[1]
    stage = build_stage(config, anatomy, part, weights=None).train()
    schedule = seq1f1b(ranks=1, microbatches=1, slices=slices)
    return Pipeline({0: stage}, schedule, functional.mse_loss, record=True)


if __name__ == "__main__":
    main()
