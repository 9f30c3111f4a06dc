"""Optimizer steps without a barrier: taken at once, validated late, redone where they were wrong.

With a barrier every rank waits until the last one has finished its backwards, because only then
the global norm is known by which gradients are clipped. Here each rank steps as soon as its own
gradients are there, as if nothing had to be clipped and no number were missing, and goes on with
the next step's forwards; by the end of those the norm is known everywhere. Where it demands
clipping, or is no number, every rank puts back the weights and states that it has kept a copy of,
does what the barrier would have done, and repeats the step that came after with right weights. The
result is the same to the bit.

    optimizer = PostValidatedOptimizer(pipe, torch.optim.AdamW(weights), max_norm=1.0)
    for inputs, targets in batches:
        for step in optimizer.step(inputs, targets):
            ...  # step.loss and step.grad_norm, known one call late
    optimizer.finish()

Source: P. Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 4.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError
from fullbore.runtime.ahead import Ahead, Totals
from fullbore.runtime.main_grad import gradient_of, set_gradient
from fullbore.runtime.norm import coefficient_of, scale_to
from fullbore.runtime.pipeline import Pipeline
from fullbore.runtime.sharded import local_part

__all__ = ["Kept", "PostValidatedOptimizer", "Undoable", "Validated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """A step that is certain, the same on every rank.

    grad_norm: before clipping. clipped: whether its gradients were scaled. skipped: loss or norm
    was not finite, so weights and states are those from before it. votes: the ranks' sum. redone:
    the step after it had begun with other weights, and was repeated.
    """

    loss: float | None
    grad_norm: float
    clipped: bool
    skipped: bool
    votes: float
    redone: bool = False


class Kept(Protocol):
    """A copy of all that an optimizer's step changes."""

    def undo(self) -> None:
        """Put it back."""

    def again(self) -> None:
        """Apply the gradients that weights hold now, with the learning rate and all of then."""


class Undoable(Protocol):
    """An optimizer whose step can be taken back; neither call waits for other stages' ranks."""

    def keep(self) -> Kept:
        """Copy what a step would change."""

    def step(self) -> None:
        """Apply the gradients that weights hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """A step that was taken in the hope that it will turn out right."""

    totals: Callable[[], Totals]
    ahead: Ahead
    kept: Kept
    gradients: list[tuple[nn.Parameter, torch.Tensor | None]]


class PostValidatedOptimizer:
    """Runs a pipeline's steps and an optimizer's so that no rank waits for the global norm.

    optimizer: of this rank's weights, one of torch.optim or an `Undoable`. max_norm: of all ranks'
    gradients together; None does not clip. check: called with each step that has become certain
    and the losses of its microbatches on this rank, when weights are what they should be after it;
    what it raises, on every rank, ends `step` there. Every rank makes one of these and calls it in
    the same order.

    After a step that was clipped or skipped the next one waits for its norm, since the one after
    mostly is too; as long as that goes on it is as a barrier, and nothing is repeated.

    Costs a copy of this rank's weights and optimizer states, and one more set of gradients. What
    is put back before a repetition: weights, optimizer states, buffers, torch's random numbers;
    what else a module changes by itself when it runs is not. `pipe.record` does not apply.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer | Undoable,
        *,
        max_norm: float | None = None,
        check: Callable[[Validated, Sequence[torch.Tensor]], None] | None = None,
    ) -> None:
        self._pipe, self._check = pipe, check
        self._optimizer: Undoable = (
            _TorchOptimizer(optimizer)
            if isinstance(optimizer, torch.optim.Optimizer)
            else optimizer
        )
        self._max_norm = math.inf if max_norm is None else max_norm
        self._pending: _Pending | None = None
        self._waits = False  # for the norm, after a step that had to be clipped
        self._changes_gradients = True  # the optimizer's step; not known before the first one

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        votes: float = 0.0,
    ) -> tuple[Validated, ...]:
        """Forward and backward as `Pipeline.step`, and the optimizer's step.

        Returns the steps that have become certain, oldest first: mostly the one before. votes: a
        number that is summed over ranks, for what else all must know. Raises RankError on every
        rank if any fails; the weights are then those of no particular step.
        """
        run = self._repeatable(inputs, targets, kwargs)
        ahead = run(follows=self._pending is not None)
        certain = []
        if self._pending is not None:
            pending, self._pending = self._pending, None
            done = self._settle(pending)
            if done.clipped or done.skipped:
                done, self._waits = replace(done, redone=True), True
                ahead = run(follows=True)
            certain.append(done)
        totals = ahead.begin_totals(votes)
        if self._waits:
            certain.append(self._take_known(ahead, totals()))
            self._waits = certain[-1].clipped or certain[-1].skipped
        else:
            self._pending = self._take_hopefully(ahead, totals)
        return tuple(certain)

    def finish(self) -> tuple[Validated, ...]:
        """Wait until the last step is certain; from here on weights are right.

        To be called before they are read, saved or evaluated. Returns that step, if any waited.
        """
        if self._pending is None:
            return ()
        pending, self._pending = self._pending, None
        done = self._settle(pending)
        self._waits = done.clipped or done.skipped
        return (done,)

    # -- behind them ---------------------------------------------------------------------------

    def _repeatable(
        self, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None
    ) -> Callable[..., Ahead]:
        """A function that runs the step; each run after the first begins as the first one did."""
        surroundings = _Surroundings(self._pipe)
        runs = 0

        def run(*, follows: bool) -> Ahead:
            nonlocal runs
            if runs:
                surroundings.restore()
                self._pipe.step_number -= 1
            runs += 1
            for weight in self._pipe.weights():
                if runs > 1:
                    set_gradient(weight, None)
                elif gradient_of(weight) is not None:
                    raise PipelineError(
                        "weights have gradients already, and a post-validated step takes no "
                        "others with it: set them to None, and accumulate by more microbatches"
                    )
            return self._pipe.run_ahead(inputs, targets, kwargs, follows=follows)

        return run

    def _take_hopefully(self, ahead: Ahead, totals: Callable[[], Totals]) -> _Pending:
        found = [(weight, gradient_of(weight)) for weight in ahead.weights]
        gradients = [(w, _copied(g)) for w, g in found] if self._changes_gradients else found
        versions = _versions(found)
        kept = self._optimizer.keep()
        self._optimizer.step()
        self._see_gradients(is_changed=versions != _versions(found))
        _forget_gradients(ahead)
        return _Pending(totals=totals, ahead=ahead, kept=kept, gradients=gradients)

    def _see_gradients(self, *, is_changed: bool) -> None:
        """Some optimizers change gradients in place, as SGD with nesterov and foreach does; of
        those a copy is kept, since a step may have to be taken again.
        """
        if is_changed and not self._changes_gradients:
            raise PipelineError(
                "the optimizer has changed gradients in place, which it did not do in its first "
                "step: they would be needed again; step it with a barrier"
            )
        self._changes_gradients = is_changed

    def _take_known(self, ahead: Ahead, totals: Totals) -> Validated:
        done = self._judge(totals)
        if not done.skipped:
            scale_to(ahead.weights, max_norm=self._max_norm, norm=done.grad_norm)
            self._optimizer.step()
        _forget_gradients(ahead)
        if self._check is not None:
            self._check(done, ahead.losses)
        return done

    def _settle(self, pending: _Pending) -> Validated:
        """Wait until it is known whether a step was right, and make it right if it was not."""
        done = self._judge(pending.totals())
        if done.clipped or done.skipped:
            pending.kept.undo()
        if done.clipped:
            for weight, gradient in pending.gradients:
                set_gradient(weight, gradient)
            scale_to(pending.ahead.weights, max_norm=self._max_norm, norm=done.grad_norm)
            pending.kept.again()
            _forget_gradients(pending.ahead)
        if self._check is not None:
            self._check(done, pending.ahead.losses)
        return done

    def _judge(self, totals: Totals) -> Validated:
        loss, norm = totals.loss, totals.grad_norm
        finite = math.isfinite(norm) and (loss is None or math.isfinite(loss))
        scale = float(coefficient_of(max_norm=self._max_norm, norm=norm))
        return Validated(
            loss=loss,
            grad_norm=norm,
            clipped=finite and scale < 1.0,
            skipped=not finite,
            votes=totals.votes,
        )


def _versions(gradients: Sequence[tuple[nn.Parameter, torch.Tensor | None]]) -> list[int]:
    return [local_part(gradient)._version for _, gradient in gradients if gradient is not None]


def _forget_gradients(ahead: Ahead) -> None:
    for weight in ahead.weights:
        set_gradient(weight, None)


class _Surroundings:
    """What a stage's forward may change beside gradients: buffers, and torch's random numbers."""

    def __init__(self, pipe: Pipeline) -> None:
        self._buffers = [
            (part, dict(part._buffers), _copied(dict(part._buffers)))
            for part in pipe.modules()
            if part._buffers
        ]
        self._device = pipe.device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(self._device) if self._on_cuda else None

    @property
    def _on_cuda(self) -> bool:
        return self._device.type == "cuda"

    @torch.no_grad()
    def restore(self) -> None:
        for part, buffers, values in self._buffers:
            part._buffers.clear()  # a forward may have put others in their place
            part._buffers.update(buffers)
            for buffer, value in zip(buffers.values(), values.values(), strict=True):
                if buffer is not None:
                    buffer.copy_(value)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class _TorchOptimizer:
    """Any optimizer of torch.optim, undone by a copy of its weights and states."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        module = sys.modules.get("torch.distributed.optim")  # what made one has imported it
        if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
            raise PipelineError(
                "ZeroRedundancyOptimizer keeps its states where they cannot be copied: give an "
                "Undoable of your own, or step it with a barrier"
            )
        self._optimizer = optimizer

    def keep(self) -> Kept:
        return _TorchKept(self._optimizer)

    def step(self) -> None:
        self._optimizer.step()


class _TorchKept:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._options = [_copied(_options_of(group)) for group in optimizer.param_groups]
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._weights = [(weight, weight.detach().clone()) for weight in weights]
        self._states = {
            weight: _copied(optimizer.state[weight])
            for weight in weights
            if weight in optimizer.state
        }

    @torch.no_grad()
    def undo(self) -> None:
        for weight, value in self._weights:
            weight.copy_(value)
            self._optimizer.state.pop(weight, None)
        self._optimizer.state.update(self._states)

    def again(self) -> None:
        groups = self._optimizer.param_groups
        now = [_options_of(group) for group in groups]
        for group, options in zip(groups, self._options, strict=True):
            group.update(options)
        self._optimizer.step()
        for group, options in zip(groups, now, strict=True):
            group.update(options)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    """Any nest of tensors, which learning rates and states may be, and others change in place."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(copied, value)
