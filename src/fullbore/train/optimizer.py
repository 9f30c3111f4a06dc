"""AdamW over one rank's stages, with 32-bit main weights where the stages keep 16-bit ones.

Weights go by the names that the whole model gives them, so a checkpoint fits any cut. Vectors
(norms, biases) are not decayed, as in Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fullbore.train.settings import TrainSettings
from fullbore.train.stages import Stage

__all__ = ["Optimizer", "learning_rate", "named_weights"]

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


class Optimizer:
    """AdamW: `step` after gradients are there, `state` for checkpoints."""

    def __init__(
        self, weights: Mapping[str, Sequence[nn.Parameter]], settings: TrainSettings
    ) -> None:
        """weights: as `named_weights` gives them."""
        self._weights = weights
        self._main = {
            name: [w if w.dtype == torch.float32 else _main_of(w) for w in copies]
            for name, copies in weights.items()
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
                main.grad = None if weight.grad is None else weight.grad.float()
        self._adamw.step()
        self.refresh()
        self._adamw.zero_grad()
        self.drop_gradients()

    def refresh(self) -> None:
        """Copy the main weights to the stages' own, after a step or after reading a checkpoint."""
        with torch.no_grad():
            for weight, main in self._pairs():
                if main is not weight:
                    weight.copy_(main)

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        for weight, _ in self._pairs():
            weight.grad = None

    def state(self) -> dict[str, Tensor]:
        """Main weights and moments by global names, the tensors themselves: read into them."""
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
            for name, copies in self._weights.items()
            for weight, main in zip(copies, self._main[name], strict=True)
        ]


def _main_of(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().float().clone())
