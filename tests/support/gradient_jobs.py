"""Jobs run by real ranks: pipeline gradients beside those of one process."""

from __future__ import annotations

from typing import Any

import torch
from pipe_models import batch, block_stages, differences, gradients, own, pipeline, reference
from torch import nn

from fullbore import schedules
from fullbore.ir import Schedule, from_text

Case = tuple[str, int, int | None]  # schedule, microbatches, virtual stages

ZERO_BUBBLE_2 = """\
0F0,0F1,0I0,0F2,0I1,0W0,0I2,0W1,0W2
1F0,1I0,1F1,1W0,1I1,1F2,1W1,1I2,1W2
"""


def make(case: Case, ranks: int) -> Schedule:
    name, microbatches, virtual_stages = case
    if name == "split":
        return from_text(ZERO_BUBBLE_2)
    return schedules.build(
        name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages
    )


def compare_cases(rank: int, ranks: int, cases: list[Case], **options: Any) -> dict[Case, Any]:
    """For each case: what differs from one process, over two steps and one with other shapes."""
    found = {}
    for case in cases:
        schedule = make(case, ranks)
        stages, twins = (block_stages(schedule.stages) for _ in range(2))
        with pipeline(stages, schedule, rank, **options) as pipe:
            wrong: list[str] = []
            for rows in (2, 2, 3):
                x, y = batch(rows * schedule.microbatches, seed=rows)
                m = schedule.microbatches
                losses, expected = reference(twins, x.chunk(m), y.chunk(m))
                result = pipe.step(x, y)
                wrong += differences(gradients(own(stages, schedule, rank)), expected)
                if abs(result.loss - sum(losses) / m) > 1e-6 * abs(result.loss):
                    wrong.append(f"loss {result.loss}, not {sum(losses) / m}")
                if result.losses and [float(loss) for loss in result.losses] != losses:
                    wrong.append("losses")
                for module in (*stages, *twins):
                    module.zero_grad()
        found[case] = wrong
    return found


def sgd(rank: int, ranks: int, microbatches: int) -> dict[str, torch.Tensor]:
    """Parameters after five SGD steps on 8 rows, whatever P and M are."""
    schedule = schedules.one_f_one_b(ranks=ranks, microbatches=microbatches)
    blocks = block_stages(4)
    per_stage = len(blocks) // ranks
    stages: list[nn.Module] = [
        nn.Sequential(*blocks[s * per_stage : (s + 1) * per_stage]) for s in range(ranks)
    ]
    optimizer = torch.optim.SGD([p for b in blocks for p in b.parameters()], lr=0.05)
    with pipeline(stages, schedule, rank) as pipe:
        for step in range(5):
            x, y = batch(8, seed=step)
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
    mine = blocks[rank * per_stage : (rank + 1) * per_stage]
    return {
        f"{rank * per_stage + i}.{name}": p.detach()
        for i, block in enumerate(mine)
        for name, p in block.named_parameters()
    }
