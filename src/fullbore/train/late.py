"""Training steps without the optimizer's barrier, reported when they have become certain."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fullbore.runtime import Pipeline, PostValidatedOptimizer, Validated
from fullbore.train.optimizer import KeptStep, Optimizer

__all__ = ["Certain", "LateSteps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certain:
    """A step that all ranks know to be right. step_s: of this rank's own part of it."""

    loss: float
    grad_norm: float
    lr: float
    step_s: float


class _AtRate:
    """The optimizer as `PostValidatedOptimizer` takes it: the learning rate is set before."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self.lr = optimizer, 0.0

    def keep(self) -> KeptStep:
        return self._optimizer.keep(lr=self.lr)

    def step(self) -> None:
        self._optimizer.step(lr=self.lr)


class LateSteps:
    """Steps of a trainer's pipeline and optimizer that no rank waits for.

    clip_grad: 0 clips nothing. check: given loss, losses of microbatches on this rank, and
    norm of each step that has become certain; raises where they end the run.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: Optimizer,
        *,
        clip_grad: float,
        check: Callable[[float | None, Sequence[Tensor], float], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._at_rate, self._clock = _AtRate(optimizer), clock
        self._waiting: deque[tuple[float, float]] = deque()  # learning rate and seconds of each
        self._ahead = PostValidatedOptimizer(
            pipe,
            self._at_rate,
            max_norm=clip_grad or math.inf,
            check=lambda done, losses: check(done.loss, losses, done.grad_norm),
        )
        self.stop_asked = False  # by any rank, in a step that has become certain

    def step(self, inputs: Tensor, targets: Tensor, *, lr: float, stop: bool) -> list[Certain]:
        """One more step; returns those that have become certain. stop: this rank asks to stop."""
        begun_s, self._at_rate.lr = self._clock(), lr
        done = self._ahead.step(inputs, targets, votes=float(stop))
        self._waiting.append((lr, self._clock() - begun_s))
        return self._certain(done)

    def finish(self) -> list[Certain]:
        """Wait until all steps are certain; the weights are right from here on."""
        return self._certain(self._ahead.finish())

    def _certain(self, done: tuple[Validated, ...]) -> list[Certain]:
        found = []
        for step in done:
            assert step.loss is not None
            lr, step_s = self._waiting.popleft()
            self.stop_asked = self.stop_asked or step.votes > 0
            found.append(Certain(loss=step.loss, grad_norm=step.grad_norm, lr=lr, step_s=step_s))
        return found
