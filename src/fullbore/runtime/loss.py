"""Which rank is lost, where ranks talk beside a pipeline: while they load, or save."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from fullbore.errors import RankError
from fullbore.runtime.device import CpuSide
from fullbore.runtime.flight import Flight
from fullbore.runtime.witness import Witness

__all__ = ["lost_rank"]

_PHASE = "what all ranks do together, between steps"


def lost_rank(group: dist.ProcessGroup, error: RuntimeError) -> RankError:
    """What every rank raises that finds the connections of a gloo group broken.

    Closes the group, so that ranks further away notice too: it cannot be used again.
    """
    rank, ranks = group.rank(), group.size()
    flight = Flight(rank=rank, step=None, evaluating=False, phase=_PHASE, error=str(error))
    witness = Witness(
        PrefixStore("fullbore/lost", group.get_group_store()), rank=rank, numbers=range(ranks)
    )
    CpuSide().abort(group)
    others = [other for other in range(ranks) if other != rank]
    return witness.conclude(witness.explain(flight, suspects=others), flight)
