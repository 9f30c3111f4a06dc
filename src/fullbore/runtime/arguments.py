"""The arguments of a pipeline on all ranks: refused everywhere where any rank's are wrong."""

from __future__ import annotations

import hashlib

from fullbore.errors import FullboreError, PipelineError
from fullbore.ir import Kind
from fullbore.runtime.session import Setup
from fullbore.runtime.tied import find_copies
from fullbore.runtime.wiring import Wiring

__all__ = ["agree_on_arguments"]


def agree_on_arguments(wiring: Wiring, setup: Setup, *, record: bool) -> None:
    """Refuse on every rank what is wrong on any, and what is not the same on all."""
    said = wiring.control.gather((_objection(setup), _common(setup, record=record)))
    objections = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(said) if text]
    objections += [
        f"the ranks were given different {what}"
        for what in said[0][1]
        if len({common[what] for _, common in said}) > 1
    ]
    if objections:
        raise PipelineError("; ".join(objections))


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
    return None
