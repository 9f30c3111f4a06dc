"""AdamW over one rank's stages, with 32-bit main weights where the stages keep 16-bit ones.

Gradients of 16-bit weights come in 32 bits where the pipeline keeps `main_grad`. Weights go by the
names that the whole model gives them, so a checkpoint fits any cut. Vectors (norms, biases) are not
decayed, as in Megatron. Where replicas share the work (ZeRO-1), each keeps main weights and moments
of some weights only, steps those, and hands the results round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fullbore.runtime import gradient_of, set_gradient
from fullbore.train.settings import TrainSettings
from fullbore.train.stages import Stage

__all__ = ["KeptStep", "Optimizer", "Shares", "learning_rate", "named_weights", "owners_of"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(settings: TrainSettings, step: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then a cosine down to min_lr.

    As Megatron's `--lr-decay-style cosine`, but for the first step of a warm-up, which Megatron
    spends at a rate of 0.
    """
    if step < settings.lr_warmup_iters:
        return settings.lr * (step + 1) / settings.lr_warmup_iters
    rest = max(1, settings.train_iters - settings.lr_warmup_iters)
    done = min(1.0, (step - settings.lr_warmup_iters) / rest)
    return settings.min_lr + (settings.lr - settings.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def named_weights(
    stages: Sequence[Stage], *, trained: bool = True
) -> dict[str, list[nn.Parameter]]:
    """This rank's weights that are trained, or those that are frozen, by the model's names.

    Copies of one weight stand together.
    """
    found: dict[str, list[nn.Parameter]] = {}
    for stage in stages:
        names = stage.weight_names()
        for name, weight in stage.named_parameters():
            if weight.requires_grad == trained:
                found.setdefault(names[name], []).append(weight)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How replicas share an optimizer's work. spread: as `Pipeline.spread`."""

    replica: int
    replicas: int
    spread: Callable[[Sequence[Sequence[Tensor]]], None]


def owners_of(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Which replica steps which weight: the largest first, each to the one with least so far.

    sizes: elements by name; the same on all replicas, and so is the answer.
    """
    held = [0] * replicas
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = held.index(min(held))
        held[owners[name]] += sizes[name]
    return owners


class Optimizer:
    """AdamW: `step` after gradients are there, `state` for checkpoints."""

    def __init__(
        self,
        weights: Mapping[str, Sequence[nn.Parameter]],
        settings: TrainSettings,
        *,
        shares: Shares | None = None,
    ) -> None:
        """weights: as `named_weights` gives them. shares: None where this rank steps them all."""
        self._weights, self._shares = weights, shares
        self._owners = dict.fromkeys(weights, 0)
        if shares is not None:
            sizes = {name: copies[0].numel() for name, copies in weights.items()}
            self._owners = owners_of(sizes, shares.replicas)
        self._main = {
            name: [w if w.dtype == torch.float32 else _main_of(w) for w in copies]
            for name, copies in weights.items()
            if shares is None or self._owners[name] == shares.replica
        }
        mains = [main for copies in self._main.values() for main in copies]
        decayed = [main for main in mains if main.dim() > 1]
        plain = [main for main in mains if main.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            fused=True,
        )
        for main in mains:  # now, so that a checkpoint can be read into it
            self._adamw.state[main] = {
                "step": torch.zeros((), dtype=torch.float32, device=main.device),
                **{moment: torch.zeros_like(main) for moment in _MOMENTS},
            }

    def step(self, *, lr: float) -> None:
        """Apply the gradients that the weights hold, and drop them."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for weight, main in self._pairs():
            if main is not weight:
                gradient = gradient_of(weight)
                main.grad = None if gradient is None else gradient.float()
        self._adamw.step()
        self.refresh()
        self._adamw.zero_grad()
        self.drop_gradients()

    def keep(self, *, lr: float) -> KeptStep:
        """A copy of what a step changes, and how to take that step once more."""
        return KeptStep(self, list(self._changing()), lr)

    def _changing(self) -> Iterator[Tensor]:
        """Main weights, moments and counts of steps."""
        for copies in self._main.values():
            for main in copies:
                yield main.detach()
                yield from (self._adamw.state[main][name] for name in (*_MOMENTS, "step"))

    def refresh(self) -> None:
        """Copy the main weights to the stages' own, after a step or after reading a checkpoint.

        Where replicas share the work, each gets from the others what they have stepped.
        """
        with torch.no_grad():
            for weight, main in self._pairs():
                if main is not weight:
                    weight.copy_(main)
        if self._shares is None:
            return
        by_owner: list[list[Tensor]] = [[] for _ in range(self._shares.replicas)]
        for name, owner in self._owners.items():
            by_owner[owner] += [copy.detach() for copy in self._weights[name]]
        self._shares.spread(by_owner)

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        for copies in self._weights.values():
            for weight in copies:
                set_gradient(weight, None)

    def state(self) -> dict[str, Tensor]:
        """Main weights and moments by global names, the tensors themselves: read into them.

        Where replicas share the work: of this replica's share.
        """
        state: dict[str, Tensor] = {}
        for name, copies in self._main.items():
            state[f"model.{name}"] = copies[0].detach()
            moments = self._adamw.state[copies[0]]
            for moment in (*_MOMENTS, "step"):
                state[f"optimizer.{name}.{moment}"] = moments[moment]
        return state

    def load_copies(self) -> None:
        """After `state` was read into: bring further copies on this rank, and the stages, along."""
        with torch.no_grad():
            for copies in self._main.values():
                for other in copies[1:]:
                    other.copy_(copies[0])
                    for moment in (*_MOMENTS, "step"):
                        source = self._adamw.state[copies[0]][moment]
                        self._adamw.state[other][moment].copy_(source)
        self.refresh()

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [
            (weight, main)
            for name, mains in self._main.items()
            for weight, main in zip(self._weights[name], mains, strict=True)
        ]


class KeptStep:
    """What an optimizer was before a step; see `fullbore.runtime.Kept`."""

    def __init__(self, optimizer: Optimizer, changing: Sequence[Tensor], lr: float) -> None:
        self._optimizer, self._lr = optimizer, lr
        self._copies = [(tensor, tensor.clone()) for tensor in changing]

    def undo(self) -> None:
        """Put it back."""
        for tensor, value in self._copies:
            tensor.copy_(value)
        self._optimizer.refresh()

    def again(self) -> None:
        """Apply the gradients that weights hold, at the learning rate of then."""
        self._optimizer.step(lr=self._lr)


def _main_of(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().float().clone())
