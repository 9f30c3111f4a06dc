"""Cases 1 to 8: gradients that are wrong without a word."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import Bench, join
from models import (
    Adapted,
    NeverUsed,
    Recomputed,
    SometimesUsed,
    TwiceUsed,
    Unused,
    mse_of_first,
)
from rig import (
    EVERY,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SPLIT,
    ZERO_BUBBLE,
    Kind,
    M,
    Rig,
    batch,
    blocks,
    mse,
    one_step,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from words import Row, failure_of, judge

Job = Callable[..., Any]


def per_schedule(
    bench: Bench, job: Job, kinds: tuple[Kind, ...], *args: Any, tried: str = ""
) -> Iterator[Row]:
    """The job on two ranks under each schedule, its gradients judged."""
    for kind in kinds:
        yield Row(tried=tried, under=kind.name, words=judge(bench.run(job, 2, kind, *args)))


def evaluate_before_the_step(rank: int, ranks: int, kind: Kind, options: dict[str, bool]) -> Any:
    rig = Rig(rank, ranks, kind, **options)  # type: ignore[arg-type]
    x, y = batch(2 * M)
    rig.alone(rig.cut(x), rig.cut(y))
    rig.step(x, y)
    rig.evaluate(x, y)
    return rig.gradients()


def case_1(bench: Bench) -> Iterator[Row]:
    """Evaluation between backward and optimizer step."""
    unscaled = {"scale_grads": False}
    yield from per_schedule(bench, evaluate_before_the_step, EVERY, {})
    yield from per_schedule(
        bench, evaluate_before_the_step, (ONE_F_ONE_B,), unscaled, tried="scale_grads=False"
    )


def accumulate_two_steps(rank: int, ranks: int, kind: Kind, options: dict[str, bool]) -> Any:
    rig = Rig(rank, ranks, kind, **options)  # type: ignore[arg-type]
    x, y = batch(2 * M)
    for _ in range(2):
        rig.alone(rig.cut(x), rig.cut(y))
        rig.step(x, y)
    return rig.gradients()


def case_2(bench: Bench) -> Iterator[Row]:
    """Two accumulated steps on the same batch, against the sum of two."""
    unscaled = {"scale_grads": False}
    yield from per_schedule(bench, accumulate_two_steps, EVERY, {})
    yield from per_schedule(
        bench, accumulate_two_steps, (ONE_F_ONE_B,), unscaled, tried="scale_grads=False"
    )


def frozen_first(rank: int, ranks: int, kind: Kind) -> Any:
    modules = blocks(kind.per_rank * ranks)
    modules[0].requires_grad_(False)
    return one_step(Rig(rank, ranks, kind, modules), *batch(2 * M))


def adapters_everywhere(rank: int, ranks: int, kind: Kind) -> Any:
    modules = blocks(kind.per_rank * ranks, Adapted)
    return one_step(Rig(rank, ranks, kind, modules), *batch(2 * M))


def adapters_after_a_frozen_stage(rank: int, ranks: int, kind: Kind) -> Any:
    modules = blocks(kind.per_rank * ranks, Adapted)
    modules[0].requires_grad_(False)
    return one_step(Rig(rank, ranks, kind, modules), *batch(2 * M))


def case_3(bench: Bench) -> Iterator[Row]:
    """Frozen leading stage, and low-rank adapters."""
    kinds = (ONE_F_ONE_B, *SPLIT)
    yield from per_schedule(bench, frozen_first, kinds, tried="frozen first stage")
    yield from per_schedule(bench, adapters_everywhere, kinds, tried="LoRA")
    yield from per_schedule(
        bench, adapters_after_a_frozen_stage, SPLIT, tried="LoRA after a frozen stage"
    )


def replicas(rank: int, ranks: int, kind: Kind, sharded: bool) -> Any:  # noqa: FBT001
    """Two replicas of two ranks: the gradient of the batch of both."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    place = mesh.get_local_rank("stage")

    def wrap(module: nn.Module) -> nn.Module:
        if sharded:
            return fully_shard(module, mesh=mesh["replica"])
        return DistributedDataParallel(module, process_group=mesh.get_group("replica"))

    rig = Rig(place, 2, kind, wrap=wrap, group=mesh.get_group("stage"))
    halves = [batch(2 * M, seed=seed) for seed in range(2)]
    for x, y in halves:
        rig.alone(rig.cut(x), rig.cut(y))
    rig.step(*halves[mesh.get_local_rank("replica")])
    found, expected = rig.gradients()
    return found, {name: gradient / 2 for name, gradient in expected.items()}


def case_4(bench: Bench) -> Iterator[Row]:
    """Data parallel with a split backward."""
    for name, sharded in (("DDP", False), ("fully_shard", True)):
        for kind in (ONE_F_ONE_B, *SPLIT):
            words = judge(bench.run(replicas, 4, kind, sharded))
            yield Row(tried=name, under=kind.name, words=words)


def recompute(rank: int, ranks: int, kind: Kind, use_reentrant: bool) -> Any:  # noqa: FBT001
    modules = blocks(kind.per_rank * ranks, lambda: Recomputed(use_reentrant))
    rig = Rig(rank, ranks, kind, modules)
    x, y = batch(2 * M)
    x.requires_grad_(use_reentrant)  # or its first stage would have no gradient in one process
    rig.step(x, y)  # the first step also runs each stage to learn its shapes
    rig.zero_grad()
    for module in rig.modules.values():
        module.calls = 0
    found, expected = one_step(rig, x, y)
    return found, expected, {s: module.calls / M for s, module in rig.modules.items()}


def case_5(bench: Bench) -> Iterator[Row]:
    """Checkpointed stages under a split backward, and how often each is computed."""
    for use_reentrant in (False, True):
        for kind in (ONE_F_ONE_B, *SPLIT):
            outcomes = bench.run(recompute, 2, kind, use_reentrant)
            words = judge(outcomes)
            if not failure_of(outcomes):
                words += f", {_times([o.value[2] for o in outcomes])}"
            tried = f"use_reentrant={use_reentrant}"
            yield Row(tried=tried, under=kind.name, words=words)


def _times(calls: list[dict[int, float]]) -> str:
    counts = {stage: n for part in calls for stage, n in part.items()}
    said = ", ".join(f"{counts[stage]:g}" for stage in sorted(counts))
    return f"each stage computed {said} × a microbatch (2 is one recomputation)"


def fail_and_go_on(rank: int, ranks: int, kind: Kind, store: str, watched: bool) -> Any:  # noqa: FBT001
    """The loss of the third microbatch raises; all ranks join anew and take the step again."""
    calls = iter(range(-1, 100))  # the first call learns shapes

    def fails_once(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:
            raise ValueError("on purpose")
        return mse(output, target)

    rig = Rig(rank, ranks, kind, loss=fails_once)
    try:
        rig.step(*batch(2 * M))
    except Exception:
        dist.destroy_process_group()
    join(rank, ranks, Path(store))
    rig.zero_grad()
    rig.loss = mse
    x, y = batch(2 * M)
    rig.alone(rig.cut(x), rig.cut(y))
    rig.step(x, y) if watched else rig.step_unwatched(x, y)
    return rig.gradients()


def case_6(bench: Bench) -> Iterator[Row]:
    """The same schedule object steps again after a step that failed."""
    for watched in (False, True):
        for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE):
            with tempfile.TemporaryDirectory() as folder:
                store = str(Path(folder) / "store")
                words = judge(bench.run(fail_and_go_on, 2, kind, store, watched))
            tried = "losses asked for" if watched else "losses not asked for"
            yield Row(tried=tried, under=kind.name, words=words)


def unused_weight(rank: int, ranks: int, kind: Kind) -> Any:
    modules = blocks(kind.per_rank * ranks, Unused)
    return one_step(Rig(rank, ranks, kind, modules), *batch(2 * M))


def sometimes_used(rank: int, ranks: int, kind: Kind) -> Any:
    modules = blocks(kind.per_rank * ranks, SometimesUsed)
    rig = Rig(rank, ranks, kind, modules, loss=mse_of_first)
    for seed in range(100):  # until each stage has used it, and has left it
        rig.zero_grad()
        x, y = batch(2 * M, seed=seed)
        rig.alone(rig.cut(x), rig.cut(y))
        if all(len(set(twin.used[-M:])) == 2 for twin in rig.twins[1:]):
            break
    rig.step(x, y)
    return rig.gradients()


def never_used(rank: int, ranks: int, kind: Kind) -> Any:
    modules = blocks(kind.per_rank * ranks, NeverUsed)
    return one_step(Rig(rank, ranks, kind, modules, loss=mse_of_first), *batch(2 * M))


def case_7(bench: Bench) -> Iterator[Row]:
    """A weight that nobody used, an output used by some microbatches or by none."""
    kinds = (ONE_F_ONE_B, INTERLEAVED, *SPLIT)
    yield from per_schedule(bench, unused_weight, kinds, tried="unused weight")
    yield from per_schedule(bench, sometimes_used, kinds, tried="output used now and then")
    yield from per_schedule(bench, never_used, kinds[:3], tried="output never used")


def hooks(rank: int, ranks: int, kind: Kind) -> Any:
    """Gradients of the fifth step; how often hooks fire in each, {hook: [step 1, ..]}; on what."""
    modules = blocks(kind.per_rank * ranks, TwiceUsed)
    rig = Rig(rank, ranks, kind, modules)
    counts = {"weight": 0, "accumulated": 0, "boundary": 0}

    def count(what: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[what] += 1

        return hook

    module = rig.modules[max(rig.modules)]
    module.twice.weight.register_hook(count("weight"))
    module.twice.weight.register_post_accumulate_grad_hook(count("accumulated"))

    def watch(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(count("boundary"))

    module.register_forward_pre_hook(watch)
    fired: dict[str, list[int]] = {what: [] for what in counts}
    for step in range(5):
        before = dict(counts)
        rig.zero_grad()
        found, expected = one_step(rig, *batch(2 * M, seed=step))
        for what in counts:
            fired[what].append(counts[what] - before[what])
    return found, expected, fired, max(rig.modules)


def case_8(bench: Bench) -> Iterator[Row]:
    """A weight used twice; hooks on it and on the boundary activation."""
    for kind in (ONE_F_ONE_B, INTERLEAVED, *SPLIT):
        outcomes = bench.run(hooks, 2, kind)
        words = judge(outcomes)
        if not failure_of(outcomes):
            words = f"gradients {words}; " + _hook_words([o.value[2:] for o in outcomes])
        yield Row(under=kind.name, words=words)


def _hook_words(values: list[tuple[dict[str, list[int]], int]]) -> str:
    wrong: dict[str, list[str]] = {}
    for fired, stage in values:
        for what, steps in fired.items():
            wanted = 0 if what == "boundary" and stage == 0 else M
            if steps != [wanted] * 5:
                said = f"{what} hook fires {_steps(steps)}, not {wanted}"
                wrong.setdefault(said, []).append(str(stage))
    parts = [f"{words} (stage {', '.join(sorted(stages))})" for words, stages in wrong.items()]
    return "; ".join(parts) or "hooks right"


def _steps(steps: list[int]) -> str:
    if len(set(steps)) == 1:
        return f"{steps[0]} times a step"
    return f"{steps[0]} times in step 1, {steps[-1]} in step 5"


CASES = {
    1: case_1,
    2: case_2,
    3: case_3,
    4: case_4,
    5: case_5,
    6: case_6,
    7: case_7,
    8: case_8,
}
