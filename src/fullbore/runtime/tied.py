"""Tied weights: one parameter of the model, held by several stages as copies.

After each step the gradients of all copies are summed, so that every copy gets the same update
and the copies stay bitwise equal. Norms count a tied weight once, at its first stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fullbore.errors import PipelineError
from fullbore.runtime.device import Group
from fullbore.runtime.main_grad import gradient_dtype, gradient_of, set_gradient

__all__ = ["TiedWeight", "find_copies"]


def find_copies(
    names: Mapping[int, str], stages: Mapping[int, nn.Module]
) -> dict[int, nn.Parameter]:
    """This rank's copies of one tied weight, by stage; PipelineError for a name that is none."""
    copies: dict[int, nn.Parameter] = {}
    for stage, name in names.items():
        if stage in stages:
            parameters = dict(stages[stage].named_parameters(remove_duplicate=False))
            if name not in parameters:
                near = ", ".join(sorted(parameters)[:8])
                raise PipelineError(
                    f"tied: stage {stage} has no parameter {name!r} (it has {near} ...)"
                )
            copies[stage] = parameters[name]
    return copies


@dataclass(slots=True, kw_only=True)
class TiedWeight:
    """This rank's copies of one tied weight, and the group of the ranks that hold others.

    copies: distinct parameters of this rank. owner: whether the first copy is the model's first.
    group: None where one rank holds all copies. root: the group's rank that holds the first.
    """

    copies: Sequence[nn.Parameter]
    owner: bool
    group: Group | None
    root: int
    _before: list[torch.Tensor | None] | None = None

    @torch.no_grad()
    def equalize(self) -> None:
        """Give every copy the value of the model's first one."""
        first = self.copies[0]
        if self.group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = self.root
            self.group.broadcast([first.data], options).wait()
        for copy in self.copies[1:]:
            copy.copy_(first)

    def begin(self) -> None:
        """Set earlier steps' gradients aside: only this step's are to be summed."""
        self._before = [gradient_of(copy) for copy in self.copies]
        for copy in self.copies:
            set_gradient(copy, None)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum this step's gradients over all copies and add the earlier steps' back."""
        grads = [grad for grad in map(gradient_of, self.copies) if grad is not None]
        total = (
            grads[0]
            if grads
            else torch.zeros_like(self.copies[0], dtype=gradient_dtype(self.copies[0]))
        )
        for grad in grads[1:]:
            total = total.add_(grad)
        if self._sum(total, used=bool(grads)):
            for copy in self.copies:
                set_gradient(copy, total if copy is self.copies[0] else total.clone())
        self.restore()

    def restore(self) -> None:
        """Add the earlier steps' gradients back (also after a failed step)."""
        for copy, before in zip(self.copies, self._before or (), strict=False):
            if before is not None:
                grad = gradient_of(copy)
                set_gradient(copy, before if grad is None else before.add_(grad))
        self._before = None

    def _sum(self, total: torch.Tensor, *, used: bool) -> bool:
        """Sum over the group; returns whether any rank used its copies."""
        if self.group is None:
            return used
        uses = torch.tensor([float(used)], device=total.device)
        self.group.allreduce([uses]).wait()
        if uses.item() == 0:
            return False
        self.group.allreduce([total]).wait()
        return True
