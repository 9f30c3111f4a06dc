"""What a step works on, and what the ranks have learnt of its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fullbore.ir import Kind
from fullbore.runtime.layout import Layout

__all__ = ["Batch", "Learnt", "Losses", "MessageKind"]

MessageKind = tuple[Kind, int, int]  # F or B, stage that sends it, number of the input's signature


class Losses:
    """The losses of a step's microbatches.

    On CPU their numbers are kept, not their tensors: a few bytes of each would lie between the
    large blocks that a microbatch frees, keep the heap from joining those, and so make the process
    grow with the number of microbatches. On CUDA reading a number would make the host wait.
    """

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor | float] = {}
        self._dtype, self._shape = torch.float32, torch.Size()

    def __len__(self) -> int:
        return len(self._values)

    def keep(self, microbatch: int, loss: torch.Tensor) -> None:
        """loss: a tensor with one element."""
        if loss.is_cuda:
            self._values[microbatch] = loss.detach()
        else:
            self._values[microbatch] = loss.item()
            self._dtype, self._shape = loss.dtype, loss.shape

    def sum(self) -> float:
        """In double precision, in the order in which they came."""
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for value in self._values.values():
            total = total.to(value.device) if isinstance(value, torch.Tensor) else total
            total += value.reshape(()) if isinstance(value, torch.Tensor) else value
        return float(total)

    def tensors(self) -> list[torch.Tensor]:
        """As the loss function gave them, in the order of microbatches, without their graphs."""
        in_order = [value for _, value in sorted(self._values.items())]
        return [
            value
            if isinstance(value, torch.Tensor)
            else torch.full(self._shape, value, dtype=self._dtype, device="cpu")
            for value in in_order
        ]


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a step works on: one entry a microbatch in each list."""

    inputs: list[Any]  # where the first stage is, else Nones
    targets: list[Any]  # where the last stage is, else Nones
    kwargs: list[dict[str, Any]]
    signatures: list[int]  # which shapes the inputs have, as numbered by the first stage's rank
    train: bool
    return_outputs: bool
    rows: int | None = None  # of the tensors that were split, where that is known
    counts: list[float] = field(default_factory=list)  # where the last stage is, with count_fn
    losses: Losses = field(default_factory=lambda: Losses())  # filled where the last stage is
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Learnt:
    """Layouts of messages: those that both ends know, and those seen in the current step."""

    known: dict[MessageKind, Layout] = field(default_factory=dict)
    seen: dict[MessageKind, Layout] = field(default_factory=dict)

    def see(self, kind: MessageKind, layout: Layout) -> None:
        """Both ends of a link see a new kind of message in the same step."""
        before = self.seen.setdefault(kind, layout)
        if before != layout or not layout.fixed:
            self.seen[kind] = Layout(tensors=layout.tensors, structure=b"", fixed=False)

    def commit(self) -> None:
        """The step went well everywhere: what was seen is known at both ends from now on."""
        self.known.update((kind, layout) for kind, layout in self.seen.items() if layout.fixed)
        self.seen.clear()
