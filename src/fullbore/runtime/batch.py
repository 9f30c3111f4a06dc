"""What a step works on, and what the ranks have learnt of its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fullbore.ir import Kind
from fullbore.runtime.layout import Layout

__all__ = ["Batch", "Learnt", "MessageKind"]

MessageKind = tuple[Kind, int, int]  # F or B, stage that sends it, number of the input's signature


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
    losses: dict[int, torch.Tensor] = field(default_factory=dict)  # filled where the last stage is
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
