"""Where a rank stands: among all processes, on which device, and how it joins the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullbore.errors import ConfigError, RankError
from fullbore.train.team import Team

__all__ = ["RankPlace", "cores_here", "device_for", "joined", "mesh_of"]

_PATIENCE = timedelta(minutes=60)  # one rank may convert a model while the others wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a process stands among all ranks, and among those of its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def speaks_of(self, error: RankError) -> bool:
        """Whether this process is the one of its machine to tell an error that every rank has."""
        if error.reporter is None:
            return True
        first = self.rank - self.local_rank
        told_here = first <= error.reporter < first + self.local_size
        return self.rank == error.reporter if told_here else self.local_rank == 0


@contextmanager
def joined(
    place: RankPlace,
    device: torch.device,
    *,
    ranks: int,
    replicas: int = 1,
    patience_s: float = 1800.0,
) -> Iterator[Team]:
    """The team of all D x P ranks, while they are joined.

    Ranks are numbered as Megatron does it: those that hold the same stages stand side by side,
    so that process r is pipeline rank r // D of replica r mod D. patience_s: how long to wait for
    all of them to come, and for each other once they train. Raises ConfigError unless so many are
    there, RankError if they do not come.
    """
    if place.size != ranks * replicas:
        raise ConfigError(
            f"{place.size} processes were started and --pipeline-model-parallel-size is {ranks}, "
            f"--data-parallel-size {replicas}: start {ranks * replicas} processes, or set them so "
            f"that their product is {place.size}"
        )
    if place.size == 1:
        yield Team()
        return
    _join(place, device, patience_s)
    try:
        team = Team(
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            group=dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_s)),
            patient=dist.new_group(backend="gloo", timeout=_PATIENCE),
            mesh=mesh_of(device.type, ranks=ranks, replicas=replicas) if replicas > 1 else None,
        )
        yield team
        team.gather(None)  # nobody leaves before all are done
    finally:
        dist.destroy_process_group()


def mesh_of(device_type: str, *, ranks: int, replicas: int) -> DeviceMesh:
    """The D x P ranks in Megatron's order: dp varies faster than pp."""
    return init_device_mesh(device_type, (ranks, replicas), mesh_dim_names=("pp", "dp"))


def _join(place: RankPlace, device: torch.device, patience_s: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=patience_s))
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise RankError(
            rank=None,
            action="joining the others",
            cause=(
                f"rank {place.rank} did not reach all of the {place.size} processes within "
                f"{patience_s:g} s: is each started, on every machine? ({reason})"
            ),
        ) from error


def cores_here() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_for(place: RankPlace, kind: str) -> torch.device:
    """This rank's device; kind is auto, cpu or cuda. ConfigError where there is no GPU for it."""
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if place.local_rank >= devices:
        if devices == 0:
            raise ConfigError("there is no GPU that torch can use here: leave --device out, or cpu")
        raise ConfigError(
            f"there are {place.local_size} ranks on this machine and {devices} GPUs: use at most "
            f"{devices} ranks, or --device cpu"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device
