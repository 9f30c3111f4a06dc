"""Jobs run by real ranks: what `fullbore calibrate` measures of several machines."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fullbore.train.calibrate import neighbourhood


def summed(rank: int, hosts: list[str]) -> float:
    """The number of ranks that this one's sums are over."""
    found = torch.ones(1)
    dist.all_reduce(found, group=neighbourhood(hosts, rank))
    return found.item()
