"""Jobs run by real ranks: steps that are validated late, beside steps with a barrier."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from gradient_jobs import Case, make
from pipe_models import WIDTH, Block, batch, mse, own
from replica_jobs import Found, mesh_of
from torch import nn

from fullbore.errors import FullboreError
from fullbore.runtime import Pipeline, PostValidatedOptimizer, Validated

STEPS = 10
LARGE, NOT_A_NUMBER = (2, 3, 7), 5  # steps with large gradients, and one with a loss that is none
MAX_NORM = 2.0


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "a rate that is a tensor": lambda weights: torch.optim.AdamW(
        weights, lr=torch.tensor(1e-2), foreach=False
    ),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9),
    "changes gradients": lambda weights: torch.optim.SGD(
        weights, lr=1e-2, momentum=0.9, nesterov=True, foreach=True
    ),
}


class Noisy(Block):
    """With dropout, buffers that every forward in training changes, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.batch_norm = nn.Dropout(0.2), nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.batch_norm(self.drop(super().forward(x))) * (1 + 0.01 * self.seen)


def data(step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch(rows, seed=step)
    if step in LARGE:
        y = y * 30
    if step == NOT_A_NUMBER:
        y[0, 0] = math.nan
    return x, y


def train(rank: int, ranks: int, case: Case, kind: str, late: bool, replicas: int = 1) -> Found:
    """Ten steps at a falling learning rate; what came of them."""
    schedule = make(case, ranks)
    torch.manual_seed(0)
    stages = [Noisy() for _ in range(schedule.stages)]
    mesh = mesh_of(replicas, ranks) if replicas > 1 else None
    here = rank if mesh is None else mesh.get_local_rank("pp")
    mine = own(stages, schedule, here)
    torch.manual_seed(rank)
    weights = [p for module in mine.values() for p in module.parameters()]
    optimizer: Any = OPTIMIZERS[kind](weights)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    pipe = Pipeline(mine, schedule, mse, mesh=mesh)
    told: list[Validated] = []
    ahead = PostValidatedOptimizer(pipe, optimizer, max_norm=MAX_NORM)
    for step in range(STEPS):
        x, y = data(step, 2 * schedule.microbatches * replicas)
        x, y = (t.chunk(replicas)[pipe.replica] for t in (x, y))
        if late:
            told += ahead.step(x, y, votes=1.0)
        else:
            told.append(with_barrier(pipe, optimizer, x, y))
        rates.step()
        if step == 6 and late:
            told += ahead.finish()
    told += ahead.finish() if late else ()
    pipe.close()
    states = [
        value
        for weight in weights
        for _, value in sorted(optimizer.state[weight].items())
        if isinstance(value, torch.Tensor)
    ]
    buffers = [b for module in mine.values() for b in module.buffers()]
    return {
        "tensors": [t.detach().clone() for t in (*weights, *states, *buffers)],
        "figures": [(d.loss, d.grad_norm, d.clipped, d.skipped) for d in told],
        "redone": [d.redone for d in told],
        "votes": {d.votes for d in told},
    }


def with_barrier(pipe: Pipeline, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Validated:
    loss = pipe.step(x, y).loss
    norm = pipe.clip_grad_norm(MAX_NORM)
    finite = loss is not None and math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step()
    optimizer.zero_grad()
    clipped = finite and MAX_NORM / (norm + 1e-6) < 1
    return Validated(loss=loss, grad_norm=norm, clipped=clipped, skipped=not finite, votes=0)


def differences(rank: int, ranks: int, cases: list[tuple[Case, str]], replicas: int = 1) -> Any:
    """For each case, what late validation gives, and whether that is the barrier's to the bit."""
    found = []
    for case, kind in cases:
        late, barrier = (
            train(rank, ranks, case, kind, late, replicas=replicas) for late in (True, False)
        )
        pairs = zip(late["tensors"], barrier["tensors"], strict=True)
        found.append(
            {
                "case": case,
                "same": all(torch.equal(a, b) for a, b in pairs),
                "figures": late["figures"],
                "expected": barrier["figures"],
                "redone": late["redone"],
                "votes": late["votes"],
                "moved": not torch.equal(late["tensors"][0], torch.zeros_like(late["tensors"][0])),
            }
        )
    return found


def nobody_waits(rank: int, ranks: int) -> bool:
    """The last rank takes its optimizer's step only when the first one is in the next step's
    second forward, which a barrier would not let it reach.
    """
    schedule = make(("1f1b", 4, None), ranks)
    torch.manual_seed(0)
    mine = own([Block() for _ in range(ranks)], schedule, rank)
    module = mine[rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    store = dist.distributed_c10d._get_default_store()
    forwards, steps = iter(range(1000)), iter(range(1000))

    def announce(*_: Any) -> None:
        if next(forwards) == 2 * schedule.microbatches + 1:
            store.set("in the next step", "1")

    def gate(*_: Any) -> None:
        if next(steps) == 1:
            store.wait(["in the next step"])

    if rank == 0:
        module.register_forward_pre_hook(announce)
    if rank == ranks - 1:
        optimizer.register_step_pre_hook(gate)
    with Pipeline(mine, schedule, mse) as pipe:
        ahead = PostValidatedOptimizer(pipe, optimizer)
        for step in range(4):
            ahead.step(*batch(2 * schedule.microbatches, seed=step))
        ahead.finish()
    return True


def refusals(rank: int, ranks: int) -> list[str]:
    """Gradients that are there already, and weights that change their kind between two steps."""
    schedule, said = make(("1f1b", 4, None), ranks), []
    mine = own([Block() for _ in range(ranks)], schedule, rank)
    module = mine[rank]
    with Pipeline(mine, schedule, mse) as pipe:
        ahead = PostValidatedOptimizer(pipe, torch.optim.SGD(module.parameters(), lr=1e-2))
        x, y = batch(8)
        pipe.step(x, y)
        try:
            ahead.step(x, y)
        except FullboreError as error:
            said.append(str(error))
        module.zero_grad()
        ahead.step(x, y)
        module.norm.bias.requires_grad_(False)
        try:
            ahead.step(x, y)
        except FullboreError as error:
            said.append(str(error))
    return said
