"""What a pipeline's arguments must be, judged by each rank and then by all of them together.

Where any rank's arguments are wrong, or those differ that all must share, every rank refuses with
the same words, before anything is wired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from fullbore.errors import FullboreError, PipelineError
from fullbore.ir import Kind, Schedule
from fullbore.runtime.argument_kinds import is_duration, objection_to_kinds
from fullbore.runtime.file_host import try_folder
from fullbore.runtime.meeting import Patience, Said
from fullbore.runtime.recompute import is_recomputed_whole, most_blocks, where_placed
from fullbore.runtime.sharded import is_sharded, objection_to_shards
from fullbore.runtime.slices import takes_carry
from fullbore.runtime.tied import find_copies
from fullbore.runtime.watchdog import OnStall, log_stall
from fullbore.runtime.wiring import Rendezvous
from fullbore.verify import check, check_runnable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


__all__ = ["Arguments", "Judgement", "judge", "patience_of", "rendezvous_of"]


# Arguments that must be the same on all ranks, beside those that are told in words of their own.
_SHARED = (
    "reduction",
    "overlap_p2p",
    "static_shapes",
    "main_grad_dtype",
    "reduce_dtype",
    "record",
    "recompute",
)
_DEFAULT_TIMEOUT_S = 1800.0


def patience_of(
    timeout_s: float, stall_timeout_s: float | None, on_stall: OnStall | None
) -> Patience:
    """How long to wait for other ranks; where these make no sense, which `judge` will say, half
    an hour in silence.
    """
    return Patience(
        timeout_s=timeout_s if is_duration(timeout_s) else _DEFAULT_TIMEOUT_S,
        stall_s=stall_timeout_s if is_duration(stall_timeout_s) else None,
        on_stall=on_stall if callable(on_stall) else log_stall,
    )


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
        if not isinstance(schedule, Schedule):
            raise PipelineError(f"schedule is a fullbore Schedule, not {schedule!r:.60}")
        if schedule.ranks > 1:
            raise PipelineError(
                f"the schedule has {schedule.ranks} ranks, but torch.distributed is not "
                "initialized: start the ranks with torchrun and call init_process_group first"
            )
        return Rendezvous(store=HashStore(), rank=0, ranks=1, timeout=timeout)
    return Rendezvous.of(group, timeout=timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """One rank's arguments. values: all of `Pipeline`'s by name, of whatever kind they are."""

    values: Mapping[str, Any]
    rendezvous: Rendezvous

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """This rank's modules."""
        stages: Mapping[int, nn.Module] = self.values["stages"]
        return stages

    @property
    def schedule(self) -> Schedule:
        """What to run."""
        schedule: Schedule = self.values["schedule"]
        return schedule

    @property
    def tied(self) -> Sequence[Mapping[int, str]]:
        """Weights that stages share."""
        tied: Sequence[Mapping[int, str]] = self.values["tied"]
        return tied


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
    said = Said(objection=None, common={}, place=given.rendezvous.rank)
    try:
        _check(given)
        said = replace(
            said,
            common=_common(given),
            weights=_weights(given.stages),
            recompute=_blocks_asked(given),
            blocks=most_blocks(given.stages.values()),
        )
    except FullboreError as found:
        error = found
    except Exception as found:  # the others wait for this rank's word, whatever it ran into
        error = PipelineError(f"the arguments cannot be judged: {type(found).__name__}: {found}")
    if error is not None:
        said = replace(said, objection=str(error))
    return Judgement(said=said, error=error, alone=len(given.rendezvous.everyone) == 1)


def _common(given: Arguments) -> dict[str, str]:
    """The arguments that must be the same on all ranks, by the words that name them."""
    return {
        **_tied_kinds(given),
        "schedules": hashlib.sha256(str(given.schedule).encode()).hexdigest(),
        "numbers of slices": str(given.schedule.slices),
        "tied weights": str([sorted(names.items()) for names in given.tied]),
        "values of count_fn (some, and none)": str(given.values["count_fn"] is not None),
        **{f"values of {name}": str(given.values[name]) for name in _SHARED},
    }


def _tied_kinds(given: Arguments) -> dict[str, str]:
    """Shape and type of each tied weight, where a copy of it is here."""
    kinds: dict[str, str] = {}
    for names in given.tied:
        for copy in find_copies(names, given.stages).values():
            told = f"{list(copy.shape)} of {copy.dtype}"
            what = f"shapes or dtypes of a tied weight, {_named(names)}"
            if kinds.setdefault(what, told) != told:
                raise PipelineError(f"tied: {_named(names)} are {kinds[what]} and {told}")
    return kinds


def _named(names: Mapping[int, str]) -> str:
    return ", ".join(f"{name!r} of stage {stage}" for stage, name in sorted(names.items()))


def _weights(stages: Mapping[int, nn.Module]) -> str:
    """What the weights of this rank have in common with those of its replicas."""
    listed = [
        (stage, name, tuple(weight.shape), str(weight.dtype))
        for stage, module in sorted(stages.items())
        for name, weight in module.named_parameters()
    ]
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _blocks_asked(given: Arguments) -> int:
    """How many blocks of a stage are to be recomputed, 0 where that is not said in blocks."""
    recompute = given.values["recompute"]
    return recompute if isinstance(recompute, int) else 0


def _check(given: Arguments) -> None:
    objection = objection_to_kinds(given.values)
    if objection is not None:
        raise PipelineError(objection)
    if given.values["count_fn"] is not None and given.values["reduction"] != "mean":
        raise PipelineError('count_fn says what the loss is a mean of: use reduction="mean"')
    if given.values["group"] is not None and given.values["mesh"] is not None:
        raise PipelineError("group and mesh say the same twice: give one of them")
    check(given.schedule, blocking_sends=not given.values["overlap_p2p"])
    check_runnable(given.schedule)
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
    if given.values["recompute"] == "none" and schedule.has(Kind.R):
        raise PipelineError(
            'the schedule places recomputations (R): give recompute="placed" for the stages where '
            'it does, "full" for all, or a number of blocks'
        )
    _check_offload(given)
    _check_slices(given)
    if schedule.stages - 1 in modules and given.values["loss_fn"] is None:
        raise PipelineError("the last stage is here, but loss_fn is missing")


def _check_offload(given: Arguments) -> None:
    """What cannot leave is refused: there would be nothing in it, or too much."""
    if not given.schedule.offloads:
        return
    for stage, module in given.stages.items():
        if not given.schedule.has(Kind.OFFLOAD, stage=stage):
            continue
        recompute = where_placed(given.values["recompute"], given.schedule, stage)
        if is_recomputed_whole(module, recompute):
            raise PipelineError(
                f"the schedule offloads (OFFLOAD), but with recompute={recompute!r} stage "
                f"{stage} keeps nothing that could leave: give up one of the two, or recompute "
                "some of its blocks only"
            )
        if any(is_sharded(weight) for weight in module.parameters()):
            raise PipelineError(
                f"the schedule offloads (OFFLOAD), and stage {stage} is sharded by fully_shard, "
                "whose gathered weights would leave with the activations: use one of the two"
            )
    folder = given.values["offload_folder"]
    try_folder(None if folder is None else Path(folder))


def _check_slices(given: Arguments) -> None:
    """Stages must carry from slice to slice, and what cannot go with it is refused."""
    schedule, recompute = given.schedule, given.values["recompute"]
    if schedule.slices == 1:
        return
    cuts = f"{schedule.name} cuts sequences into {schedule.slices} slices"
    for stage, module in given.stages.items():
        if not takes_carry(module):
            raise PipelineError(
                f"{cuts}, and stage {stage} ({type(module).__name__}) does not take carry: let its "
                "forward take carry=() or what it returned for the slice before, and return the "
                "pair (output, carry); or choose a schedule that does not cut sequences"
            )
        if any(is_sharded(weight) for weight in module.parameters()):
            raise PipelineError(
                f"{cuts}, and stage {stage} is sharded by fully_shard: use one of the two, or "
                "shard optimizer states only (ZeRO-1)"
            )
    if schedule.offloads:
        raise PipelineError(
            f"{cuts}, and offloads (OFFLOAD) what later slices still attend to: use one of the two"
        )
    if isinstance(recompute, int) and recompute:
        raise PipelineError(
            f"{cuts}, and recompute={recompute} would run blocks again on what they carry: give "
            'recompute="full", "placed" or "none"'
        )


def _check_tied(given: Arguments) -> None:
    stages = given.schedule.stages
    for names in given.tied:
        if not set(names) <= set(range(stages)):
            raise PipelineError(f"tied names a stage outside 0..{stages - 1}: {names}")
        find_copies(names, given.stages)
