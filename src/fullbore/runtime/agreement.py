"""What ranks agree on as a step begins: which kinds of messages will come.

Every message is described once; from then on both ends of its link know its layout from the kind
of the microbatch's input, which only the first stage's rank sees, and which goes by a number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from fullbore.errors import PipelineError
from fullbore.runtime.batch import Batch, Learnt
from fullbore.runtime.control import Control
from fullbore.runtime.microbatch import signature
from fullbore.runtime.recorder import ActivationMeter
from fullbore.runtime.setup import Setup

__all__ = ["Agreement"]


class Agreement:
    """This rank's part in it, and `learnt`, what it has learnt of messages so far."""

    def __init__(self, setup: Setup, control: Control) -> None:
        self._setup, self._control = setup, control
        self.learnt = Learnt()
        self._numbers: dict[Hashable, int] = {}
        self._circumstances: Hashable = None

    def begin(self, batch: Batch, meter: ActivationMeter | None = None) -> Callable[[], Learnt]:
        """Give the microbatches' signatures numbers that all ranks know; forget if any rank must.

        Layouts follow from the inputs' shapes, which the first stage's rank sees, and from
        circumstances, of which every rank sees its own. The answer is waited for only where a
        rank is about to talk: the first stage computes meanwhile.
        """
        circumstances = _circumstances(self._setup, batch)
        changed, self._circumstances = circumstances != self._circumstances, circumstances
        numbers = self._number(batch)
        if changed and meter is not None:
            meter.forget()
        rows = [float(batch.rows or 0) if self._setup.holds(stage) else 0.0 for stage in (0, -1)]
        wait = self._control.begin_total([*numbers, float(changed), *rows])

        def agree() -> Learnt:
            *agreed, changes, input_rows, target_rows = wait()
            _check_rows(int(input_rows), int(target_rows))
            batch.signatures = [int(number) for number in agreed]
            if changes:
                self.learnt = Learnt()
            if changes > changed and meter is not None:  # elsewhere, too
                meter.forget()
            return self.learnt

        return agree

    def begin_to_hear(self, batch: Batch) -> Callable[[], Learnt]:
        """As `begin`, but only the first stage's rank speaks: some of the others are
        still busy with the step before.
        """
        if _circumstances(self._setup, batch) != self._circumstances:
            raise PipelineError(
                "weights, autocast or keyword arguments are of another kind than in the step "
                "before, of which other ranks must hear first: call finish() before this step"
            )
        teller = self._setup.schedule.placement.stage_to_rank[0]
        wait = self._control.begin_to_tell(teller, [*self._number(batch), float(batch.rows or 0)])

        def agree() -> Learnt:
            *numbers, rows = wait()
            if self._setup.holds(-1):
                _check_rows(int(rows), batch.rows or 0)
            batch.signatures = [int(number) for number in numbers]
            return self.learnt

        return agree

    def _number(self, batch: Batch) -> list[int]:
        """A number for each kind of input, where the first stage is; zeros elsewhere."""
        if not self._setup.holds(0):
            return [0] * len(batch.inputs)
        keys = [
            (signature(value), signature(kwargs), batch.train)
            for value, kwargs in zip(batch.inputs, batch.kwargs, strict=True)
        ]
        batch.signatures = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        return batch.signatures


def _circumstances(setup: Setup, batch: Batch) -> Hashable:
    """What decides the layouts of this rank's messages beside the step's inputs."""
    weights = (p for module in setup.stages.values() for p in module.parameters())
    kind = setup.side.device.type
    return (
        tuple((weight.requires_grad, weight.dtype) for weight in weights),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        tuple(signature(kwargs) for kwargs in batch.kwargs if kwargs),
    )


def _check_rows(inputs: int, targets: int) -> None:
    """Where first and last stage are on two ranks, neither sees the other's batch; 0: unknown."""
    if inputs and targets and inputs != targets:
        raise PipelineError(
            f"the inputs have {inputs} rows along dimension 0, the targets {targets}: both are "
            "split along it; if that is not meant, give a list with one entry a microbatch"
        )
