"""Jobs run by real ranks: activations that leave for the host and come back, beside one process."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import Any

import torch
from pipe_models import batch, differences, gradients, own, pipeline, reference
from split_jobs import Failing
from split_models import stages_of
from torch.distributed.device_mesh import init_device_mesh

from fullbore import schedules
from fullbore.ir import Schedule
from fullbore.passes import offload, split_backward
from fullbore.verify import verify


@dataclass(frozen=True)
class Case:
    """A schedule, what of it leaves, and the kind of stages on it."""

    family: str
    microbatches: int
    virtual_stages: int | None = None
    ahead: int = 1
    delay: int | None = None  # of W; None: whole backwards
    model: str = "block"

    def whole(self, ranks: int) -> Schedule:
        made = schedules.build(
            self.family,
            ranks=ranks,
            microbatches=self.microbatches,
            virtual_stages=self.virtual_stages,
        )
        return made if self.delay is None else split_backward(made, delay=self.delay)

    def schedule(self, ranks: int) -> Schedule:
        return offload(self.whole(ranks), ahead=self.ahead)


@dataclass(frozen=True)
class Found:
    """What a case came to. live: the verifier's peak of this rank, live_without: that of the same
    schedule without copies; kept: bytes of a microbatch, by stage.
    """

    wrong: list[str]
    peak_bytes: int
    peak_bytes_without: int
    live: int
    live_without: int
    kept: set[int]
    files: list[str]


def compare(rank: int, ranks: int, cases: list[Case], folder: str) -> list[Found]:
    return [_compare(rank, ranks, case, folder) for case in cases]


def _compare(rank: int, ranks: int, case: Case, folder: str) -> Found:
    """Three steps beside one process, the third with other shapes, then one without copies."""
    schedule, m = case.schedule(ranks), case.microbatches
    stages, twins = (stages_of(case.model, schedule.stages) for _ in range(2))
    wrong: list[str] = []
    with pipeline(stages, schedule, rank, record=True, offload_folder=folder) as pipe:
        for rows in (3, 2, 2):
            x, y = batch(rows * m, seed=rows)
            losses, expected = reference(twins, x.chunk(m), y.chunk(m))
            result = pipe.step(x, y)
            wrong += differences(gradients(own(stages, schedule, rank)), expected)
            if result.losses and [float(loss) for loss in result.losses] != losses:
                wrong.append("losses")
            pipe.evaluate(x, y)
        files = os.listdir(folder)
    files += os.listdir(folder) + open_files(folder)
    with pipeline(stages, case.whole(ranks), rank, record=True) as pipe:
        without = pipe.step(x, y)
    kept = {result.stage_activation_bytes[s] for s in schedule.placement.stages_of(rank)}
    return Found(
        wrong=wrong,
        peak_bytes=result.peak_activation_bytes[rank],
        peak_bytes_without=without.peak_activation_bytes[rank],
        live=live(schedule, rank),
        live_without=live(case.whole(ranks), rank),
        kept=kept,
        files=files,
    )


def live(schedule: Schedule, rank: int) -> int:
    """Most stages x microbatches at once, as the verifier counts them."""
    unit = schedule.ranks / schedule.stages
    return next(
        n
        for n in range(1, 99)
        if all(v.rank != rank for v in verify(schedule, peak_limit=n * unit))
    )


def open_files(folder: str) -> list[str]:
    """Files in a folder that this process still has open, with or without a name."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # the one that lists them
        found += [target] if target.startswith(folder) else []
    return found


def with_replicas(rank: int, folder: str) -> list[str]:
    """Two replicas of two ranks, weights in bfloat16 with main gradients: what differs from two
    that do not offload.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    place = mesh.get_local_rank("pp")
    case, found = Case("1f1b", 4, ahead=0), []
    for schedule in (case.whole(2), case.schedule(2)):
        stages = [stage.bfloat16() for stage in stages_of("block", 2)]
        x, y = (part.bfloat16() for part in batch(8, seed=mesh.get_local_rank("dp")))
        with pipeline(
            stages,
            schedule,
            place,
            mesh=mesh,
            main_grad_dtype=torch.float32,
            offload_folder=folder,
        ) as pipe:
            for _ in range(2):
                pipe.step(x, y)
            grads = {name: p.main_grad.clone() for name, p in stages[place].named_parameters()}
        found.append(grads)
    return [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])]


def fails(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """A step that fails in rank 0's second backward, with activations away, and one after it."""
    case = Case("gpipe", 4, ahead=0)
    schedule, m = case.schedule(ranks), case.microbatches
    stages, twins = (
        [Failing(stage) for stage in stages_of("block", schedule.stages)] for _ in range(2)
    )
    x, y = batch(2 * m)
    pipe = pipeline(stages, schedule, rank, offload_folder=folder)
    pipe.step(x, y)
    stages[0].fails_at = stages[0].calls + 2
    try:
        pipe.step(x, y)
        error = "none"
    except Exception as failure:
        error = str(failure)
    left = os.listdir(folder) + open_files(folder)
    for module in (*stages, *twins):
        module.zero_grad()
    _, expected = reference(twins, x.chunk(m), y.chunk(m))
    pipe.step(x, y)
    wrong = differences(gradients(own(stages, schedule, rank)), expected)
    pipe.close()
    return {"error": error, "wrong": wrong, "left": left + open_files(folder)}


def is_killed(rank: int, ranks: int, folder: str) -> list[str]:
    """Rank 1 dies in its second backward, with activations away; what the others then see."""
    case = Case("gpipe", 4, ahead=0)
    schedule = case.schedule(ranks)
    stages = [Failing(stage) for stage in stages_of("block", schedule.stages)]
    pipe = pipeline(stages, schedule, rank, offload_folder=folder, timeout_s=20.0)
    x, y = batch(8)
    pipe.step(x, y)
    if rank == 1:
        stages[1].fails_at = stages[1].calls + 2
        stages[1].count = die_of(stages[1])
    with contextlib.suppress(Exception):
        pipe.step(x, y)
    return os.listdir(folder)


def die_of(stage: Failing) -> Any:
    def count(gradient: torch.Tensor) -> None:
        stage.calls += 1
        if stage.calls == stage.fails_at:
            os.kill(os.getpid(), signal.SIGKILL)

    return count
