"""Real arithmetic on two ranks: how much of what the schedule allows does an engine reach?

One process runs the microbatches one after the other on one core; two ranks run them through a
pipeline on a core each. Efficiency = time of one process / (2 x time of the pipeline). The bound
is the same with the time that the simulator gives for the stages' measured times (medians over
the microbatches of our own steps, messages free), so reached = simulated / measured time. A step
begins without gradients; the sum of tied weights' gradients over the ranks is in every time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pool
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from transformers import AutoConfig, LlamaConfig

from fullbore import schedules
from fullbore.cost.measured import costs_of
from fullbore.ir import Schedule
from fullbore.passes import split_backward
from fullbore.runtime import Pipeline
from fullbore.sim import simulate
from fullbore.train.anatomy import examine
from fullbore.train.balance import balance, piece_costs
from fullbore.train.build import build_stage, empty_model
from fullbore.train.sources import find_model
from fullbore.train.stages import parts_of, shared_weights

SUMMARY = "real arithmetic on two ranks: efficiency against the simulator's bound"

RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """config: of a causal language model, weights drawn. rows, sequence: of one microbatch."""

    config: Any
    microbatches: int
    rows: int
    sequence: int
    rounds: int
    names: tuple[str, ...]


def build(name: str, setting: Setting) -> Schedule:
    """A schedule by its name; "split" is 1F1B with each W one action after its I."""
    if name == "split":
        whole = schedules.one_f_one_b(ranks=RANKS, microbatches=setting.microbatches)
        return replace(split_backward(whole, delay=1), name="split")
    virtual_stages = 2 if name == "interleaved" else None
    return schedules.build(
        name, ranks=RANKS, microbatches=setting.microbatches, virtual_stages=virtual_stages
    )


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model in stages, of which one rank has some."""

    stages: dict[int, nn.Module]
    tied: list[dict[int, str]]


def cut(setting: Setting, stages: int, held: tuple[int, ...]) -> Cut:
    """The stages `held` of the model in so many stages, balanced by computed cost."""
    anatomy = examine(empty_model(setting.config))
    costs = piece_costs(empty_model(setting.config), anatomy, seq_length=setting.sequence)
    layers = balance(costs, stages=stages) if stages > 1 else (anatomy.layers,)
    parts = parts_of(anatomy, layers)
    return Cut(
        stages={s: build_stage(setting.config, anatomy, parts[s], weights=None) for s in held},
        tied=shared_weights(anatomy, parts),
    )


Step = Callable[[], Any]


def batch_of(setting: Setting) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [M x rows, sequence]."""
    shape = (setting.microbatches * setting.rows, setting.sequence)
    generator = torch.Generator().manual_seed(0)
    vocabulary = setting.config.vocab_size
    ids = torch.randint(vocabulary, shape, generator=generator)
    return ids, torch.randint(vocabulary, shape, generator=generator)


def one_process(setting: Setting) -> Step:
    """The microbatches one after the other through the whole model."""
    (model,) = cut(setting, 1, (0,)).stages.values()
    ids, labels = batch_of(setting)
    chunks = (ids.chunk(setting.microbatches), labels.chunk(setting.microbatches))
    batches = list(zip(*chunks, strict=True))

    def step() -> None:
        model.zero_grad()
        for x, y in batches:
            (loss_fn(model(x), y) / setting.microbatches).backward()

    return step


@dataclass(slots=True)
class Ours:
    """Our pipeline, which records every step."""

    pipe: Pipeline
    stages: dict[int, nn.Module]
    batch: tuple[torch.Tensor, torch.Tensor]
    timelines: list[Any]

    def __call__(self) -> None:
        """One step."""
        for module in self.stages.values():
            module.zero_grad()
        self.timelines.append(self.pipe.step(*self.batch).timeline)


def ours(schedule: Schedule, setting: Setting, rank: int) -> Ours:
    """A step of ours."""
    mine = cut(setting, schedule.stages, schedule.placement.stages_of(rank))
    pipe = Pipeline(mine.stages, schedule, loss_fn, tied=mine.tied, record=True)
    return Ours(pipe, mine.stages, batch_of(setting), [])


def torchs(schedule: Schedule, setting: Setting, rank: int) -> Step | None:
    """A step of torch's schedule of that name, on the same cut.

    It leaves tied weights alone, so what its users must do is done here: sum their gradients.
    """
    kinds: dict[str, Any] = {
        "gpipe": torch_schedules.ScheduleGPipe,
        "1f1b": torch_schedules.Schedule1F1B,
        "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    }
    if schedule.name not in kinds:
        return None
    mine = cut(setting, schedule.stages, schedule.placement.stages_of(rank))
    device = torch.device("cpu")
    made = [PipelineStage(m, s, schedule.stages, device) for s, m in mine.stages.items()]
    copies = [m.get_parameter(t[s]) for t in mine.tied for s, m in mine.stages.items() if s in t]
    given = made if schedule.name == "interleaved" else made[0]
    pipe = kinds[schedule.name](given, setting.microbatches, loss_fn=loss_fn)
    ids, labels = batch_of(setting)
    first, last = rank == 0, rank == RANKS - 1

    def step() -> None:
        for module in mine.stages.values():
            module.zero_grad()
        pipe.step(*([ids] if first else []), **({"target": labels, "losses": []} if last else {}))
        for copy in copies:
            dist.all_reduce(copy.grad)

    return step


def turns(engines: list[str], rounds: int) -> list[tuple[str, bool]]:
    """Whose turn it is, and whether it counts: each one's first does not.

    The engines alternate, every other round backwards; the one process, in whose turns the other
    rank's memory grows cold, goes before and after them all.
    """
    alone = [("one", round_ > 0) for round_ in range(1 + rounds // 2)]
    there_and_back = (engines, engines[::-1])
    between = [(e, round_ > 0) for round_ in range(rounds + 1) for e in there_and_back[round_ % 2]]
    return [*alone, *between, *[("one", True)] * (rounds - rounds // 2)]


def keep_to_one_core(rank: int) -> None:
    """Each rank has its own, where there are as many and the system can say so."""
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= RANKS:
            os.sched_setaffinity(0, {cores[rank]})


def measure(rank: int, setting: Setting) -> dict[str, Any]:
    """Times by engine and schedule, and what the simulator says of our own steps."""
    keep_to_one_core(rank)
    made: dict[str, Step] = {}
    if rank == 0:
        made["one"] = one_process(setting)
    for name in setting.names:
        schedule = build(name, setting)
        made[f"fullbore {name}"] = ours(schedule, setting, rank)
        theirs = torchs(schedule, setting, rank)
        if theirs is not None:
            made[f"torch {name}"] = theirs
    times: dict[str, list[float]] = {name: [] for name in ["one", *sorted({*made} - {"one"})]}
    for name, counts in turns(list(times)[1:], setting.rounds):
        dist.barrier()
        begun_s = time.perf_counter()
        if name in made:
            made[name]()
        dist.barrier()
        if counts:
            times[name].append(time.perf_counter() - begun_s)
    simulated = {}
    for name in setting.names:
        schedule, step = build(name, setting), made[f"fullbore {name}"]
        assert isinstance(step, Ours)
        costs = costs_of(step.timelines[1:], schedule)
        free = costs.model_copy(update={"hop_s": 0.0, "overhead_s": 0.0})
        simulated[name] = float(simulate(schedule, free).end_s.max())
    return {"times": times, "simulated": simulated}


def rows_of(model: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each schedule and engine."""
    one_s = statistics.median(found["times"]["one"])
    rows = []
    for key, times in found["times"].items():
        engine, _, name = key.partition(" ")
        if not name:
            continue
        step_s, simulated_s = statistics.median(times), found["simulated"][name]
        rows.append(
            {
                "model": model,
                "schedule": name,
                "engine": engine,
                "one_process_s": one_s,
                "step_s": step_s,
                "efficiency": one_s / (RANKS * step_s),
                "bound": one_s / (RANKS * simulated_s),
                "reached": simulated_s / step_s,
            }
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--models", nargs="+", default=["llama-384", "smollm2"])
    parser.add_argument("-m", "--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="sequences of a microbatch")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "interleaved", "split"])
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"))


def config_of(model: str, cache: Path) -> Any:
    """llama-384: 12 blocks of 384 dimensions; smollm2, or any model that `fullbore train` takes."""
    if model == "llama-384":
        return LlamaConfig(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=12,
            num_attention_heads=6,
            num_key_value_heads=6,
            vocab_size=4096,
            tie_word_embeddings=False,
        )
    return AutoConfig.from_pretrained(find_model(model, cache=cache, needs_weights=False))


def main(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run each model; print as they come."""
    rows: list[dict[str, Any]] = []
    print("model      schedule     engine       step  efficiency  bound  reached")
    for model in given.models:
        setting = Setting(
            config=config_of(model, given.cache),
            microbatches=given.microbatches,
            rows=given.rows,
            sequence=given.sequence,
            rounds=given.rounds,
            names=tuple(given.schedules),
        )
        for row in rows_of(model, pool.run(RANKS, measure, setting)[0]):
            rows.append(row)
            print(
                f"{model:10} {row['schedule']:12} {row['engine']:9} {row['step_s'] * 1e3:6.0f} ms "
                f"{row['efficiency']:9.3f} {row['bound']:7.3f} {row['reached']:7.3f}",
                flush=True,
            )
    return rows
