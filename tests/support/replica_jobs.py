"""Jobs run by real ranks: replicas of a pipeline beside one process that sees the whole batch."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gradient_jobs import Case, make
from peer_jobs import tied_language_model
from pipe_models import WIDTH, Block, batch, block_stages, chain, gradients, mse, own
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy

from fullbore.errors import FullboreError
from fullbore.ir import Schedule
from fullbore.runtime import Pipeline

Found = dict[str, Any]


def mesh_of(replicas: int, ranks: int, *, pp_first: bool = False) -> DeviceMesh:
    shape, names = (replicas, ranks), ("dp", "pp")
    if pp_first:
        shape, names = shape[::-1], names[::-1]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


class Replicated:
    """One rank's part of D replicas, and a twin of the whole model."""

    def __init__(
        self,
        mesh: DeviceMesh,
        schedule: Schedule,
        stages: Sequence[nn.Module],
        loss_fn: Any = mse,
        **options: Any,
    ) -> None:
        self.schedule, self.m = schedule, schedule.microbatches
        self.stages, self.twins = stages, copy.deepcopy(list(stages))
        self.mine = own(stages, schedule, mesh.get_local_rank("pp"))
        self.loss_fn = loss_fn
        self.pipe = Pipeline(self.mine, schedule, loss_fn, mesh=mesh, **options)
        self.replicas, self.replica = mesh["dp"].size(), self.pipe.replica

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """This replica's rows of a batch."""
        return value.chunk(self.replicas)[self.replica]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float | None:
        return self.pipe.step(self.share(x), self.share(y)).loss

    def expect(self, x: torch.Tensor, y: torch.Tensor, divisor: float | None = None) -> float:
        """The whole batch through the twin, added to its gradients; its loss."""
        total, parts = 0.0, self.replicas * self.m
        divisor = float(parts) if divisor is None else divisor
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = self.loss_fn(chain(self.twins, a), b) / divisor
            loss.backward()
            total += float(loss.detach())
        return total

    def off(self) -> float:
        """How far gradients are from the twin's, by its norm; infinite where one has none."""
        wanted = gradients(dict(enumerate(self.twins)))
        worst = 0.0
        for name, grad in gradients(self.mine).items():
            other = wanted[name]
            if (grad is None) != (other is None):
                return float("inf")
            if grad is not None and other is not None:
                worst = max(worst, float((grad - other).norm() / other.norm().clamp(min=1e-6)))
        return worst

    def zero(self) -> None:
        for module in (*self.stages, *self.twins):
            module.zero_grad()


def whole_batch(rank: int, replicas: int, ranks: int, cases: list[Case]) -> list[Found]:
    """For each schedule: gradients and loss of three steps, the last of another shape."""
    found = []
    for number, case in enumerate(cases):
        mesh = mesh_of(replicas, ranks, pp_first=bool(number % 2))
        schedule = make(case, ranks)
        s = Replicated(mesh, schedule, block_stages(schedule.stages))
        with s.pipe:
            for rows in (2, 2, 3):
                x, y = batch(rows * s.m * replicas, seed=rows)
                loss, expected = s.step(x, y), s.expect(x, y)
                found.append({"case": case, "off": s.off(), "loss": loss, "expected": expected})
                s.zero()
    return found


class SometimesUsed(Block):
    """Has a weight that no one uses, and one that only rows of a positive sum use."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x.detach().flatten()[0]) > 1e3:
            x = x + self.side(x) * 1e-3
        return super().forward(x)


def edges(rank: int, replicas: int, ranks: int, case: Case) -> Found:
    """Unequal starts, unused weights, accumulated steps, sums, 16 bits, not a number, clipping."""
    mesh, schedule = mesh_of(replicas, ranks), make(case, ranks)
    found: Found = {}

    made = block_stages(schedule.stages)
    with torch.no_grad():
        for weight in (p for module in made for p in module.parameters()):
            weight.add_(0.1 * mesh.get_local_rank("dp"))  # made equal by the pipeline
    s = Replicated(mesh, schedule, made)
    s.twins = block_stages(schedule.stages)
    found["equal"] = all(
        torch.equal(p, q)
        for stage, module in s.mine.items()
        for p, q in zip(module.parameters(), s.twins[stage].parameters(), strict=True)
    )
    grads = []
    for seed in (1, 2):
        s.step(*batch(2 * s.m * replicas, seed=seed))
        grads.append(gradients(s.mine))
        s.zero()
    for seed in (1, 2):
        s.step(*batch(2 * s.m * replicas, seed=seed))
    summed = gradients(s.mine)
    found["accumulated"] = all(torch.equal(summed[n], grads[0][n] + grads[1][n]) for n in summed)

    for p in (p for module in s.twins for p in module.parameters()):
        p.grad = None
    for seed in (1, 2):
        s.expect(*batch(2 * s.m * replicas, seed=seed))
    norm = s.pipe.clip_grad_norm(0.05)
    found["norm"] = norm
    weights = [p for module in s.twins for p in module.parameters()]
    found["norm_alone"] = float(nn.utils.clip_grad_norm_(weights, 0.05))
    found["clipped"] = s.off()
    x, y = batch(2 * s.m * replicas)
    found["evaluated"] = s.pipe.evaluate(s.share(x), s.share(y)).loss
    s.zero()
    found["evaluated_alone"] = s.expect(x, y)
    y[-1, 0] = float("nan")
    found["nan"] = s.step(x, y)
    s.pipe.close()

    s = Replicated(mesh, schedule, block_stages(schedule.stages), reduction="sum")
    x, y = batch(2 * s.m * replicas)
    found["sum"] = s.step(x, y), s.expect(x, y, divisor=1.0), s.off()
    s.pipe.close()

    torch.manual_seed(8)
    s = Replicated(mesh, schedule, [SometimesUsed() for _ in range(schedule.stages)])
    x, y = batch(2 * s.m * replicas)
    x[0] = 1e4  # row 0 of the first replica only uses `side`
    s.step(x, y), s.expect(x, y)
    found["unused"] = s.off()
    none = [n for n, g in gradients(s.mine).items() if g is None]
    found["none"] = all("unused" in n or "side" in n for n in none)
    found["side"] = any("side" in n and g is not None for n, g in gradients(s.mine).items())
    s.pipe.close()

    stages = [module.bfloat16() for module in block_stages(schedule.stages)]
    s = Replicated(mesh, schedule, stages, reduce_dtype=torch.float32)
    x, y = (t.bfloat16() for t in batch(2 * s.m * replicas))
    s.step(x, y), s.expect(x, y)
    found["bf16"] = s.off()
    s.pipe.close()
    return found


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def count_tokens(labels: torch.Tensor) -> torch.Tensor:
    return (labels != -100).sum()


def token_weights(rank: int, replicas: int, ranks: int, cases: list[Case]) -> list[Found]:
    """Very unequal numbers of labels that are not ignored: none in a microbatch, one in another."""
    found = []
    for case in cases:
        schedule = make(case, ranks)
        stages: list[nn.Module] = [*block_stages(schedule.stages)]
        mesh = mesh_of(replicas, ranks)
        s = Replicated(mesh, schedule, stages, token_loss, count_fn=count_tokens)
        rows = 4 * s.m * replicas
        x, _ = batch(rows)
        labels = torch.arange(rows) % WIDTH
        labels[0:4] = -100
        labels[5:8] = -100
        labels[-4 * s.m :] = -100
        labels[-1] = 3
        with s.pipe:
            for _ in range(2):
                loss = s.step(x, labels)
                whole = cross_entropy(chain(s.twins, x), labels, ignore_index=-100)
                whole.backward()
                found.append({"off": s.off(), "loss": loss, "expected": float(whole)})
                evaluated = s.pipe.evaluate(s.share(x), s.share(labels)).loss
                found[-1]["evaluated"] = evaluated
                s.zero()
            labels[:] = -100
            found[-1]["nothing"] = s.step(x, labels)
            found[-1]["zeros"] = all(
                not g.any() for g in gradients(s.mine).values() if g is not None
            )
    return found


def tied(rank: int, replicas: int, ranks: int, case: Case, max_norm: float) -> Found:
    """Five steps of AdamW with clipping; first and last weight are one."""
    schedule = make(case, ranks)
    last = schedule.stages - 1
    made = tied_language_model(schedule.stages)
    mesh = mesh_of(replicas, ranks)
    names = {0: "table.weight", last: "table.weight"}
    s = Replicated(mesh, schedule, made, cross_entropy, tied=[names])
    s.twins[-1].table.weight = s.twins[0].table.weight
    alone = list({id(p): p for m in s.twins for p in m.parameters()}.values())
    optimizers = [
        torch.optim.AdamW(weights, lr=1e-2)
        for weights in ([p for m in s.mine.values() for p in m.parameters()], alone)
    ]
    norms, norms_alone = [], []
    for step in range(5):
        ids = torch.randint(
            0, 20, (2 * s.m * replicas,), generator=torch.Generator().manual_seed(step)
        )
        s.step(ids, ids.roll(3)), s.expect(ids, ids.roll(3))
        norms.append(s.pipe.clip_grad_norm(max_norm))
        norms_alone.append(float(nn.utils.clip_grad_norm_(alone, max_norm)))
        for optimizer in optimizers:
            optimizer.step()
        s.zero()
    s.pipe.close()
    off = max(
        float((p - q).abs().max())
        for stage, module in s.mine.items()
        for p, q in zip(module.parameters(), s.twins[stage].parameters(), strict=True)
    )
    tables = [s.mine[n].table.weight.detach() for n in (0, last) if n in s.mine]
    return {"norms": norms, "alone": norms_alone, "off": off, "tables": tables}


def one_after_another(
    rank: int, replicas: int, ranks: int, jobs: list[tuple[Callable[..., Any], tuple[Any, ...]]]
) -> list[Any]:
    """Several jobs in the same processes."""
    return [job(rank, replicas, ranks, *args) for job, args in jobs]


class Fails(Exception):
    """On purpose."""


def fails(rank: int, replicas: int, ranks: int, case: Case, where: str) -> Found:
    """One rank of one replica fails in an action or in reducing; then all step again."""
    mesh, schedule = mesh_of(replicas, ranks), make(case, ranks)
    s = Replicated(mesh, schedule, block_stages(schedule.stages))
    x, y = batch(2 * s.m * replicas)
    s.step(x, y)
    s.zero()
    victim = s.mine[schedule.placement.stages_of(s.pipe.rank)[0]]
    hooks = []

    def fail(*_: Any) -> None:
        raise Fails("on purpose")

    if rank == replicas * ranks - 1 and where == "action":
        hooks.append(victim.register_forward_pre_hook(fail))
    if rank == replicas * ranks - 1 and where == "reduction":
        sparse = torch.ones(WIDTH).to_sparse()

        def spoil(weight: torch.Tensor) -> None:
            weight.grad = sparse

        hooks.append(victim.twice.register_post_accumulate_grad_hook(spoil))
    begun_s = time.monotonic()
    try:
        s.step(x, y)
        said = "nothing was raised"
    except FullboreError as error:
        said = str(error)
    took_s = time.monotonic() - begun_s
    for hook in hooks:
        hook.remove()
    s.zero()
    s.step(x, y), s.expect(x, y)
    return {"said": said, "took_s": took_s, "off": s.off()}


def dies(rank: int, replicas: int, ranks: int, case: Case) -> str:
    """The first rank of the last replica is killed in a step."""
    mesh, schedule = mesh_of(replicas, ranks), make(case, ranks)
    s = Replicated(mesh, schedule, block_stages(schedule.stages))
    x, y = batch(2 * s.m * replicas)
    s.step(x, y)
    if rank == (replicas - 1) * ranks:
        s.mine[0].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    try:
        s.step(x, y)
    except FullboreError as error:
        return str(error)
    return "nothing was raised"
