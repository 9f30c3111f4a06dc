"""Batches in an order that only seed and position decide, so that a resumed run sees the same.

A stream of tokens is cut into sequences of s + 1 tokens that overlap by one; inputs are the first
s, targets the last s. Each pass over the text has an order of its own. Which rank asks, and how
the model is cut, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fullbore.errors import DataError
from fullbore.train.text import Tokens

__all__ = ["Batch", "Batches"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Token ids: inputs [b, s] and targets [b, s], the inputs shifted by one."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Batches:
    """Sequences of a stream of tokens."""

    def __init__(
        self,
        tokens: Tokens,
        *,
        seq_length: int,
        batch_size: int,
        seed: int | None,
        what: str,
        least: int | None = None,
    ) -> None:
        """seed: of the order; None leaves the text's own order.

        least: the fewest sequences that will do, by default a batch (with fewer, a batch has
        some twice). Raises DataError where the stream, called `what`, has not that many.
        """
        self._tokens, self._length, self._size, self._seed = tokens, seq_length, batch_size, seed
        self._epoch, self._shuffled = -1, np.zeros(0, dtype=np.int64)
        self.sequences = max(0, (len(tokens) - 1) // seq_length)
        least = batch_size if least is None else least
        if self.sequences < least:
            raise DataError(
                f"{what} has {len(tokens)} tokens, {self.sequences} sequences of {seq_length}, and "
                f"{least} are needed: give more text, or smaller --seq-length or "
                "--global-batch-size"
            )

    def at(self, position: int) -> Batch:
        """The batch that begins after `position` sequences, counted over all passes."""
        rows = [self._row(index) for index in range(position, position + self._size)]
        windows = torch.from_numpy(np.stack(rows))
        return Batch(inputs=windows[:, :-1].contiguous(), targets=windows[:, 1:].contiguous())

    def _row(self, index: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        epoch, place = divmod(index, self.sequences)
        start = self._order(epoch, place) * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int64)

    def _order(self, epoch: int, place: int) -> int:
        if self._seed is None:
            return place
        if self._epoch != epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._epoch, self._shuffled = epoch, generator.permutation(self.sequences)
        return int(self._shuffled[place])
