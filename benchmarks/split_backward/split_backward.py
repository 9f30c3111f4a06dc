"""What splitting a backward costs: (I + W) / full backward on transformer blocks.

    python benchmarks/split_backward/split_backward.py [--rounds N] [--threads N]

Each round times a full backward, Fullbore's I and W, and those of torch.distributed.pipelining, on
the same block and input; the next round begins with another of the three, since each finds what
memory the one before has left behind. The forwards before them are not counted, and gradients
accumulate as in the middle of a step. Printed are medians over rounds and the median of the rounds'
ratios; ratios of one run compare, seconds of two runs do not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from fullbore.runtime.split import SplitBackward
from fullbore.runtime.stage import StageRunner


class Llama(nn.Module):
    """One Llama block with its rotary embedding; hidden states in, hidden states out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        heads = max(1, hidden // 64)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            attn_implementation="sdpa",
        )
        self.block, self.rotary = LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.rotary(x, torch.arange(x.shape[1])[None])
        output: torch.Tensor = self.block(x, position_embeddings=positions)
        return output


class Gpt2(nn.Module):
    """One GPT-2 block, whose products are Conv1D."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        config = GPT2Config(
            n_embd=hidden,
            n_head=hidden // 64,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            attn_implementation="sdpa",
        )
        self.block = GPT2Block(config, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.block(x)
        return output if isinstance(output, torch.Tensor) else output[0]


class LowRank(nn.Module):
    """A frozen linear layer with a trained adapter of rank 8 beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 8, bias=False)
        self.up = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(x) + self.up(self.down(x))
        return output


def adapted(hidden: int) -> nn.Module:
    """A frozen Llama block with an adapter on every linear layer."""
    block = Llama(hidden).requires_grad_(False)
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LowRank(child))
    return block


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A stage and its input's shape [b, s, h]."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    goal: float


CASES = (
    Case(name="Llama 384, 1 x 128", make=lambda: Llama(384), shape=(1, 128, 384), goal=1.10),
    Case(name="Llama 64, 1 x 64", make=lambda: Llama(64), shape=(1, 64, 64), goal=1.30),
    Case(name="GPT-2 384, 1 x 128", make=lambda: Gpt2(384), shape=(1, 128, 384), goal=1.10),
    Case(name="Llama 384 + LoRA 8", make=lambda: adapted(384), shape=(1, 128, 384), goal=1.10),
)


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds of each round."""

    full: list[float] = field(default_factory=list)
    input_half: list[float] = field(default_factory=list)
    weight_half: list[float] = field(default_factory=list)
    torch_halves: list[float] = field(default_factory=list)


class Rig:
    """One block as a stage in the middle of a pipeline, under each engine."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.module = case.make().train()
        self.x, self.gradient = torch.randn(case.shape), torch.randn(case.shape)
        self.whole = StageRunner(module=self.module, loss_fn=None, loss_weight=1.0)
        split = SplitBackward(self.module, microbatches=[0])
        self.split = StageRunner(module=self.module, loss_fn=None, loss_weight=1.0, split=split)

    def forward(self, runner: StageRunner) -> None:
        leaf = self.x.clone().requires_grad_()
        runner.forward(0, leaf, [leaf], {}, None, True)

    def full(self, times: Times) -> None:
        self.forward(self.whole)
        times.full.append(seconds(lambda: self.whole.backward(0, [self.gradient])))

    def halves(self, times: Times) -> None:
        self.forward(self.split)
        times.input_half.append(seconds(lambda: self.split.backward_input(0, [self.gradient])))
        times.weight_half.append(seconds(lambda: self.split.backward_weight(0)))

    def torch_halves(self, times: Times) -> None:
        x = self.x.detach().clone().requires_grad_()
        outputs = [self.module(x)]
        weights: Iterator[nn.Parameter] = self.module.parameters()

        def both() -> None:
            _, groups = stage_backward_input(outputs, [self.gradient], [x], weights)
            stage_backward_weight(self.module.parameters(), groups)

        times.torch_halves.append(seconds(both))


def seconds(action: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


def measure(case: Case, rounds: int) -> Times:
    rig = Rig(case)
    times = Times()
    for round in range(rounds + 3):
        counted = times if round >= 3 else Times()  # the first ones warm up
        turns = (rig.full, rig.halves, rig.torch_halves)
        for turn in range(len(turns)):
            turns[(round + turn) % len(turns)](counted)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds")
    print(f"{'ms, medians':20}{'full':>8}{'I':>8}{'W':>8}{'I+W':>8}{'ratio':>8}{'torch':>8}  goal")
    for case in CASES:
        times = measure(case, arguments.rounds)
        halves = [i + w for i, w in zip(times.input_half, times.weight_half, strict=True)]
        columns = (times.full, times.input_half, times.weight_half, halves)
        ratios = [ratio(ours, times.full) for ours in (halves, times.torch_halves)]
        print(
            f"{case.name:20}"
            + "".join(f"{statistics.median(column) * 1e3:8.2f}" for column in columns)
            + f"{ratios[0]:8.3f}{ratios[1]:8.3f}  <= {case.goal:.2f}"
        )


def ratio(times: list[float], full: list[float]) -> float:
    return statistics.median(ours / whole for ours, whole in zip(times, full, strict=True))


if __name__ == "__main__":
    main()
