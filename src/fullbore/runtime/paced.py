"""A paced stage: its compute is a sleep of known length, everything around it is real.

It lets many ranks share few cores: sleeping ranks take no core, so the pipeline's own overhead,
messages and waits show, and nothing else does.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import torch
from torch import nn

__all__ = ["PacedStage", "paced_loss", "wake_on_time"]

_PR_SET_TIMERSLACK = 29  # linux/prctl.h


def wake_on_time() -> None:
    """Ask Linux to end this thread's sleeps when they are due, not up to 50 us later.

    For whoever owns a process that runs paced stages; does nothing on other systems.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def _sleep_until(end_s: float) -> None:
    remaining_s = end_s - time.perf_counter()
    if remaining_s > 0:
        time.sleep(remaining_s)


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        end_s = time.perf_counter() + ctx.backward_s
        result = torch.empty_like(gradient)
        _sleep_until(end_s)
        return result, None


class PacedStage(nn.Module):
    """Takes and gives a float32 tensor; its forward and backward take known times, and move no
    numbers.

    forward_s, backward_s: seconds of one microbatch, from the call of the stage (or of its node in
    the graph) to its end: like a real stage's, they include what autograd does for its operations.
    The input is made to want a gradient, so that the first stage of a pipeline sleeps in its
    backward too.
    """

    def __init__(self, *, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes forward_s; x and the result have any one shape."""
        end_s = time.perf_counter() + self.forward_s
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        result: torch.Tensor = _Paced.apply(x, self.backward_s)  # type: ignore[no-untyped-call]
        result = result.view_as(x)  # an ordinary node, as a real stage ends with
        _sleep_until(end_s)
        return result


def paced_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    """A loss that costs next to nothing: one operation forward, one backward."""
    return output.sum()
