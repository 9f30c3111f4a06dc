"""A step that has run on this rank while others may still be busy with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fullbore.runtime.batch import Batch
from fullbore.runtime.norm import counted_here, squares_of
from fullbore.runtime.session import Session

__all__ = ["Ahead", "Totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What all ranks know of a step once the last of them is done, the same on every one."""

    loss: float | None
    grad_norm: float
    votes: float


class Ahead:
    """This rank's part of a step is done: gradients are there, the loss and their norm are not.

    weights: of this rank.
    """

    def __init__(
        self,
        session: Session,
        batch: Batch,
        weights: Sequence[nn.Parameter],
        *,
        is_first_replica: bool,
    ) -> None:
        self.weights = weights
        self._session, self._batch = session, batch
        self._counted = counted_here(weights, session.tied, is_first_replica=is_first_replica)

    @property
    def losses(self) -> list[torch.Tensor]:
        """Of the microbatches, where the last stage is on this rank; else none."""
        return self._batch.losses.tensors()

    def begin_totals(self, votes: float) -> Callable[[], Totals]:
        """Begin to add up what decides about the step; the result waits for all ranks.

        votes: any number, summed over ranks too.
        """
        session = self._session
        with session.together("measuring the gradient"):
            parts = [*session.loss_parts(self._batch), squares_of(self._counted), votes]
            wait = session.world.begin_total(parts, late=True)

        def totals() -> Totals:
            with session.together("validating the step"):
                *losses, squares, voted = wait()
            return Totals(loss=session.loss_of(losses), grad_norm=squares**0.5, votes=voted)

        return totals
