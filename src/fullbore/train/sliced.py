"""What a training run must be where its sequences are cut into slices. No torch is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.train.settings import TrainSettings

__all__ = ["check_sliced"]


def check_sliced(settings: TrainSettings, slices: int) -> None:
    """Raise ConfigError, naming the nearest legal value, for what does not go with k slices."""
    length, recomputation = settings.seq_length, settings.recomputation
    if settings.slices not in (None, slices):
        raise ConfigError(
            f"--slices {settings.slices}: a schedule file says itself whether its microbatches are "
            "slices; leave it, or choose --schedule seq1f1b"
        )
    if length % slices:
        below = length // slices * slices
        legal = f"{below} or {below + slices}" if below else f"{slices}"
        raise ConfigError(
            f"--seq-length {length} makes no {slices} --slices of one length: the nearest legal "
            f"values are {legal}"
        )
    if slices > 1 and settings.offload is not None:
        raise ConfigError("--offload would send away what later --slices attend to: leave it")
    if slices > 1 and isinstance(recomputation, int) and recomputation:
        raise ConfigError(
            f"--recompute {recomputation} blocks cannot be done with --slices: the nearest legal "
            "value is full"
        )
