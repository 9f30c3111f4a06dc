"""Jobs run by real ranks: optimizer states and weights that are sharded over replicas."""

from __future__ import annotations

import copy
from typing import Any

import torch
from gradient_jobs import Case, make
from pipe_models import Block, batch, block_stages, chain, mse, own
from replica_jobs import Found, Replicated, cross_entropy, mesh_of, tied_language_model
from torch import nn
from torch.distributed.fsdp import _fully_shard as fsdp
from torch.distributed.fsdp import fully_shard

from fullbore.errors import FullboreError
from fullbore.runtime import Pipeline


class Deep(nn.Module):
    """Two blocks, of which the second is sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Counted:
    """Counts FSDP's gathers and reductions."""

    def __init__(self) -> None:
        self.gathers = self.reductions = 0
        module = fsdp._fsdp_param_group
        gather, reduce = module.foreach_all_gather, module.foreach_reduce

        def counted_gather(*args: Any, **kwargs: Any) -> Any:
            self.gathers += 1
            return gather(*args, **kwargs)

        def counted_reduce(*args: Any, **kwargs: Any) -> Any:
            self.reductions += 1
            return reduce(*args, **kwargs)

        module.foreach_all_gather, module.foreach_reduce = counted_gather, counted_reduce

    def take(self) -> tuple[int, int]:
        told, self.gathers, self.reductions = (self.gathers, self.reductions), 0, 0
        return told


def fsdp_stages(rank: int, replicas: int, ranks: int, cases: list[Case]) -> list[Found]:
    """Three steps of AdamW with clipping; an evaluation, and a step of two that accumulate."""
    counted, found = Counted(), []
    for case in cases:
        schedule, mesh = make(case, ranks), mesh_of(replicas, ranks)
        torch.manual_seed(0)
        made: list[nn.Module] = [Deep() for _ in range(schedule.stages)]
        twins = copy.deepcopy(made)
        mine = own(made, schedule, mesh.get_local_rank("pp"))
        for module in mine.values():
            fully_shard(module.second, mesh=mesh["dp"])
            fully_shard(module, mesh=mesh["dp"])
        pipe = Pipeline(mine, schedule, mse, mesh=mesh)
        m = schedule.microbatches
        alone = [p for module in twins for p in module.parameters()]
        weights = [p for module in mine.values() for p in module.parameters()]
        optimizers = [torch.optim.AdamW(w, lr=1e-2) for w in (weights, alone)]
        one: Found = {"case": case, "norms": [], "alone": [], "calls": []}
        for step in range(3):
            for part in range(2 if step == 2 else 1):
                x, y = batch(2 * m * replicas, seed=10 * step + part)
                share = [t.chunk(replicas)[pipe.replica] for t in (x, y)]
                counted.take()
                one["loss"] = pipe.step(*share).loss
                one["calls"].append(counted.take())
                expected = 0.0
                for a, b in zip(x.chunk(m * replicas), y.chunk(m * replicas), strict=True):
                    loss = mse(chain(twins, a), b) / (m * replicas)
                    loss.backward()
                    expected += float(loss.detach())
                one["expected"] = expected
                one["evaluated"] = pipe.evaluate(*share).loss
            one["norms"].append(pipe.clip_grad_norm(0.05))
            one["alone"].append(float(nn.utils.clip_grad_norm_(alone, 0.05)))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        one["off"] = max(
            float((p.full_tensor() - q).abs().max())
            for stage, module in mine.items()
            for p, q in zip(module.parameters(), twins[stage].parameters(), strict=True)
        )
        one["units"] = 2 * len(mine)
        pipe.close()
        found.append(one)
    return found


def fsdp_refused(rank: int, replicas: int, ranks: int) -> list[str]:
    """A split backward, tied weights, and a mesh that the pipeline was not told of."""
    mesh, said = mesh_of(replicas, ranks), []

    def sharded(schedule: Any, made: list[nn.Module]) -> dict[int, nn.Module]:
        mine = own(made, schedule, mesh.get_local_rank("pp"))
        for module in mine.values():
            fully_shard(module, mesh=mesh["dp"])
        return mine

    split = make(("split", 3, None), ranks)
    whole = make(("1f1b", 3, None), ranks)
    names = [{0: "table.weight", 1: "table.weight"}]
    for make_it in (
        lambda: Pipeline(sharded(split, block_stages(2)), split, mse, mesh=mesh),
        lambda: Pipeline(
            sharded(whole, tied_language_model(2)), whole, cross_entropy, mesh=mesh, tied=names
        ),
        lambda: Pipeline(sharded(whole, block_stages(2)), whole, mse, group=mesh.get_group("pp")),
    ):
        try:
            make_it()
            said.append("nothing was raised")
        except FullboreError as error:
            said.append(str(error))
    return said


def zero_1(rank: int, replicas: int, ranks: int, case: Case) -> Found:
    """Five steps by torch's ZeroRedundancyOptimizer, and by AdamW on every replica."""
    mesh, schedule = mesh_of(replicas, ranks), make(case, ranks)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes seconds

    results, held = [], []
    for shard in (True, False):
        s = Replicated(mesh, schedule, block_stages(schedule.stages))
        weights = [p for module in s.mine.values() for p in module.parameters()]
        optimizer: Any = (
            ZeroRedundancyOptimizer(
                weights, torch.optim.AdamW, process_group=mesh.get_group("dp"), lr=1e-2
            )
            if shard
            else torch.optim.AdamW(weights, lr=1e-2)
        )
        for step in range(5):
            s.step(*batch(2 * s.m * replicas, seed=step))
            s.pipe.clip_grad_norm(0.1)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.optim.state if shard else optimizer.state
        held.append(sum(t.numel() for of in state.values() for t in of.values() if t.dim()))
        results.append([w.detach().clone() for w in weights])
        s.pipe.close()
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return {"equal": equal, "held": held}
