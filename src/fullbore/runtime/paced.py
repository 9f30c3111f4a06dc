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

from fullbore.runtime.products import interception

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
    def forward(ctx: Any, x: torch.Tensor, stage: PacedStage) -> torch.Tensor:
        ctx.stage = stage
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        begun_s, stage = time.perf_counter(), ctx.stage
        waits = interception.defer(stage, stage.sleep_in_weight_half)
        end_s = begun_s + stage.backward_s - (stage.weight_grad_s if waits else 0.0)
        result = torch.empty_like(gradient)
        _sleep_until(end_s)
        return result, None


class PacedStage(nn.Module):
    """Takes and gives a float32 tensor; its forward and backward take known times, and move no
    numbers.

    forward_s, backward_s: seconds of one microbatch, from the call of the stage (or of its node in
    the graph) to its end: like a real stage's, they include what autograd does for its operations.
    The input is made to want a gradient, so that the first stage of a pipeline sleeps in its
    backward too. weight_grad_s: what of a split backward W takes, half of it if not given.
    """

    def __init__(
        self, *, forward_s: float, backward_s: float, weight_grad_s: float | None = None
    ) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight_grad_s = backward_s / 2 if weight_grad_s is None else weight_grad_s

    def forward(self, x: torch.Tensor, carry: tuple[()] | None = None) -> Any:
        """Takes forward_s; x and the result have any one shape. carry: nothing, where x is a slice
        of a sequence; then the result is a pair, as the engine wants it.
        """
        end_s = time.perf_counter() + self.forward_s
        if not x.requires_grad and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        result: torch.Tensor = _Paced.apply(x, self)  # type: ignore[no-untyped-call]
        result = result.view_as(x)  # an ordinary node, as a real stage ends with
        _sleep_until(end_s)
        return result if carry is None else (result, carry)

    def sleep_in_weight_half(self) -> None:
        """W."""
        _sleep_until(time.perf_counter() + self.weight_grad_s)


def paced_loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    """A loss that costs next to nothing: one operation forward, one backward."""
    return output.sum()
