"""A paced stage: its compute is a sleep of known length, everything around it is real.

It lets many ranks share few cores: sleeping ranks take no core, so the pipeline's own overhead,
messages and waits show, and nothing else does.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

__all__ = ["PacedStage", "paced_loss"]


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return torch.empty_like(gradient), None, None


class PacedStage(nn.Module):
    """Takes and gives a float32 tensor; its forward and backward sleep, and move no numbers.

    forward_s, backward_s: seconds of one microbatch. The input is made to want a gradient, so
    that the first stage of a pipeline sleeps in its backward too.
    """

    def __init__(self, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sleep forward_s; x and the result have any one shape."""
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        result: torch.Tensor = _Paced.apply(x, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return result


def paced_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    """A loss whose gradient costs next to nothing: one number of the output."""
    return output.flatten()[0] * 0.0
