"""What a pipeline's arguments must be, judged by each rank and then by all of them together.

Where any rank's arguments are wrong, or those differ that all must share, every rank refuses with
the same words, before anything is wired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from fullbore.errors import FullboreError, PipelineError
from fullbore.ir import Kind, Schedule
from fullbore.runtime.file_host import try_folder
from fullbore.runtime.meeting import Said
from fullbore.runtime.recompute import is_recomputed_whole
from fullbore.runtime.sharded import is_sharded, objection_to_shards
from fullbore.runtime.tied import find_copies
from fullbore.runtime.wiring import Rendezvous
from fullbore.verify import check

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fullbore.runtime.recompute import Recompute

__all__ = ["Arguments", "Judgement", "judge", "rendezvous_of"]


def rendezvous_of(
    schedule: Schedule,
    group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    timeout: timedelta,
) -> Rendezvous:
    """Where the ranks of a pipeline meet: a mesh, a group, the default group, or one rank alone."""
    if mesh is not None:
        return Rendezvous.of_mesh(mesh, timeout=timeout)
    if group is None and not dist.is_initialized():
        if schedule.ranks > 1:
            raise PipelineError(
                f"the schedule has {schedule.ranks} ranks, but torch.distributed is not "
                "initialized: start the ranks with torchrun and call init_process_group first"
            )
        return Rendezvous(store=HashStore(), rank=0, ranks=1, timeout=timeout)
    return Rendezvous.of(group, timeout=timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """One rank's arguments, as far as they can be wrong.

    group_and_mesh: whether both were given. has_loss, counts: whether loss_fn and count_fn were.
    common: further arguments that must be the same on all ranks, by the words that name them.
    """

    stages: Mapping[int, nn.Module]
    schedule: Schedule
    rendezvous: Rendezvous
    group_and_mesh: bool
    has_loss: bool
    counts: bool
    tied: Sequence[Mapping[int, str]]
    reduction: str
    overlap: bool
    recompute: Recompute
    offload_folder: Path | None
    common: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one rank says of its arguments, and its own error if they are wrong."""

    said: Said
    error: FullboreError | None
    alone: bool

    def raise_together(self, objections: Sequence[str]) -> None:
        """Raise what any rank objects to, each with the class of its own error."""
        if not objections:
            return
        if self.error is not None and self.alone:
            raise self.error
        kind = PipelineError if self.error is None else type(self.error)
        raise kind("; ".join(objections))


def judge(given: Arguments) -> Judgement:
    """What this rank says of its arguments."""
    error: FullboreError | None = None
    try:
        _check(given)
    except FullboreError as found:
        error = found
    said = Said(
        objection=None if error is None else str(error),
        common=_common(given),
        place=given.rendezvous.rank,
        weights=_weights(given.stages),
    )
    return Judgement(said=said, error=error, alone=len(given.rendezvous.everyone) == 1)


def _common(given: Arguments) -> dict[str, str]:
    """The arguments that must be the same on all ranks, by the words that name them."""
    return {
        "schedules": hashlib.sha256(str(given.schedule).encode()).hexdigest(),
        "values of reduction": given.reduction,
        "tied weights": str([sorted(names.items()) for names in given.tied]),
        "values of overlap_p2p": str(given.overlap),
        "values of recompute": str(given.recompute),
        "values of count_fn (some, and none)": str(given.counts),
        **{name: str(value) for name, value in given.common.items()},
    }


def _weights(stages: Mapping[int, nn.Module]) -> str:
    """What the weights of this rank have in common with those of its replicas."""
    listed = [
        (stage, name, tuple(weight.shape), str(weight.dtype))
        for stage, module in sorted(stages.items())
        for name, weight in module.named_parameters()
    ]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _check(given: Arguments) -> None:
    if given.reduction not in ("mean", "sum"):
        raise PipelineError(f'reduction is "mean" or "sum", not {given.reduction!r}')
    if given.counts and given.reduction != "mean":
        raise PipelineError('count_fn says what the loss is a mean of: use reduction="mean"')
    if given.group_and_mesh:
        raise PipelineError("group and mesh say the same twice: give one of them")
    check(given.schedule, blocking_sends=not given.overlap)
    _check_size(given.schedule, given.rendezvous)
    _check_stages(given)
    _check_tied(given)
    objection = objection_to_shards(
        given.stages, given.schedule, replicas=given.rendezvous.replicas, tied=bool(given.tied)
    )
    if objection is not None:
        raise PipelineError(objection)


def _check_size(schedule: Schedule, rendezvous: Rendezvous) -> None:
    what = 'mesh "pp"' if rendezvous.numbers else "process group"
    if rendezvous.ranks != schedule.ranks:
        raise PipelineError(
            f"the schedule has {schedule.ranks} ranks, but the {what} {rendezvous.ranks}: "
            f"start {schedule.ranks} processes, or make a schedule for {rendezvous.ranks} ranks"
        )


def _check_stages(given: Arguments) -> None:
    schedule = given.schedule
    placed = schedule.placement.stages_of(given.rendezvous.rank)
    modules = tuple(sorted(given.stages))
    if modules != placed:
        raise PipelineError(
            f"the schedule places stages {list(placed)} here, but modules were given for "
            f"{list(modules)}"
        )
    if given.recompute == "none" and any(bool((p.kind == Kind.R).any()) for p in schedule.programs):
        raise PipelineError(
            'the schedule places recomputations (R): give recompute="full", or a number of blocks'
        )
    _check_offload(given)
    if schedule.stages - 1 in modules and not given.has_loss:
        raise PipelineError("the last stage is here, but loss_fn is missing")


def _check_offload(given: Arguments) -> None:
    """What cannot leave is refused: there would be nothing in it, or too much."""
    if not given.schedule.offloads:
        return
    for stage, module in given.stages.items():
        if is_recomputed_whole(module, given.recompute):
            raise PipelineError(
                f"the schedule offloads (OFFLOAD), but with recompute={given.recompute!r} stage "
                f"{stage} keeps nothing that could leave: give up one of the two, or recompute "
                "some of its blocks only"
            )
        if any(is_sharded(weight) for weight in module.parameters()):
            raise PipelineError(
                f"the schedule offloads (OFFLOAD), and stage {stage} is sharded by fully_shard, "
                "whose gathered weights would leave with the activations: use one of the two"
            )
    try_folder(given.offload_folder)


def _check_tied(given: Arguments) -> None:
    stages = given.schedule.stages
    for names in given.tied:
        if not set(names) <= set(range(stages)):
            raise PipelineError(f"tied names a stage outside 0..{stages - 1}: {names}")
        find_copies(names, given.stages)
