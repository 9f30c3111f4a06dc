"""What ranks check of a pipeline's arguments before they work together.

Where any rank's arguments are wrong, or those differ that all must share, every rank refuses with
the same words.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fullbore.errors import FullboreError, PipelineError
from fullbore.ir import Kind, Schedule
from fullbore.runtime.session import Setup
from fullbore.runtime.sharded import objection_to_shards
from fullbore.runtime.tied import find_copies
from fullbore.runtime.wiring import Rendezvous, Wiring

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["agree_on_arguments", "meet"]


def meet(
    schedule: Schedule,
    group: dist.ProcessGroup | None,
    mesh: DeviceMesh | None,
    timeout: timedelta,
) -> Rendezvous:
    """Where the ranks of a pipeline meet: a mesh, a group, the default group, or one rank alone."""
    if mesh is not None:
        return _of_right_size(Rendezvous.of_mesh(mesh, timeout=timeout), schedule, 'mesh "pp"')
    if group is None and not dist.is_initialized():
        if schedule.ranks > 1:
            raise PipelineError(
                f"the schedule has {schedule.ranks} ranks, but torch.distributed is not "
                "initialized: start the ranks with torchrun and call init_process_group first"
            )
        return Rendezvous(store=HashStore(), rank=0, ranks=1, timeout=timeout)
    return _of_right_size(Rendezvous.of(group, timeout=timeout), schedule, "process group")


def _of_right_size(rendezvous: Rendezvous, schedule: Schedule, what: str) -> Rendezvous:
    if rendezvous.ranks != schedule.ranks:
        raise PipelineError(
            f"the schedule has {schedule.ranks} ranks, but the {what} {rendezvous.ranks}: "
            f"start {schedule.ranks} processes, or make a schedule for {rendezvous.ranks} ranks"
        )
    return rendezvous


def agree_on_arguments(wiring: Wiring, setup: Setup, *, record: bool) -> None:
    """Refuse on every rank what is wrong on any, and what is not the same on all."""
    world, ranks = wiring.world, setup.rendezvous.ranks
    said = world.gather((_objection(setup), _common(setup, record=record), _weights(setup)))
    objections = [
        f"rank {rank}: {text}"
        for rank, (text, _, _) in zip(world.numbers, said, strict=True)
        if text
    ]
    objections += [
        f"the ranks were given different {what}"
        for what in said[0][1]
        if len({common[what] for _, common, _ in said}) > 1
    ]
    objections += [
        f"ranks {world.numbers[i % ranks]} and {world.numbers[i]} are replicas of one another, but "
        "their stages have different weights"
        for i, (_, _, weights) in enumerate(said)
        if weights != said[i % ranks][2]
    ]
    if objections:
        raise PipelineError("; ".join(objections))


def _weights(setup: Setup) -> str:
    """What the weights of this rank have in common with those of its replicas."""
    listed = [
        (stage, name, tuple(weight.shape), str(weight.dtype))
        for stage, module in sorted(setup.stages.items())
        for name, weight in module.named_parameters()
    ]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _common(setup: Setup, *, record: bool) -> dict[str, str]:
    """The arguments that must be the same on all ranks, by the words that name them."""
    return {
        "schedules": hashlib.sha256(str(setup.schedule).encode()).hexdigest(),
        "values of reduction": "mean" if setup.mean else "sum",
        "tied weights": str([sorted(names.items()) for names in setup.tied]),
        "values of overlap_p2p": str(setup.overlap),
        "values of static_shapes": str(setup.static_shapes),
        "values of recompute": str(setup.recompute),
        "values of main_grad_dtype": str(setup.main_grad_dtype),
        "values of record": str(record),
        "values of reduce_dtype": str(setup.reduce_dtype),
        "values of count_fn (some, and none)": str(setup.count_fn is None),
    }


def _objection(setup: Setup) -> str | None:
    """What is wrong with this rank's arguments, or None."""
    placed = setup.schedule.placement.stages_of(setup.rendezvous.rank)
    given = tuple(sorted(setup.stages))
    if given != placed:
        return (
            f"the schedule places stages {list(placed)} here, but modules were given for "
            f"{list(given)}"
        )
    recomputes = any(bool((p.kind == Kind.R).any()) for p in setup.schedule.programs)
    if recomputes and setup.recompute == "none":
        return (
            'the schedule places recomputations (R): give recompute="full", or a number of blocks'
        )
    if setup.holds(-1) and setup.loss_fn is None:
        return "the last stage is here, but loss_fn is missing"
    try:
        for names in setup.tied:
            if not set(names) <= set(range(setup.schedule.stages)):
                return f"tied names a stage outside 0..{setup.schedule.stages - 1}: {names}"
            find_copies(names, setup.stages)
    except FullboreError as error:
        return str(error)
    return objection_to_shards(
        setup.stages, setup.schedule, replicas=setup.rendezvous.replicas, tied=bool(setup.tied)
    )
