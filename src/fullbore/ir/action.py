"""An action: one stage doing one thing for one microbatch, written as PyTorch writes it.

`2F0` is stage 2, forward, microbatch 0. The same text stands in errors, tests, CSV files, the
command line and the documentation, so that schedules travel to and from PyTorch unchanged. `R`,
`OFFLOAD` and `RELOAD` are ours alone: PyTorch has no word for recomputations and copies to the host
that the schedule places.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from fullbore.errors import NotationError

__all__ = ["COMMUNICATION_KINDS", "COMPUTE_KINDS", "COPY_KINDS", "Action", "Kind"]


class Kind(IntEnum):
    """What an action does; the integer is what schedules keep in their arrays.

    Ordered by who is busy: the rank itself (below OFFLOAD), the copy channel between a rank and
    its host (below SEND_F), or the links between ranks.
    """

    F = 0  # forward
    B = 1  # full backward
    I = 2  # backward, input-gradient half  # noqa: E741
    W = 3  # backward, weight-gradient half
    R = 4  # recompute: make again what this stage's forward did not keep
    OFFLOAD = 5  # what this stage's forward saved begins to leave for the host
    RELOAD = 6  # it begins to come back
    SEND_F = 7  # send this stage's output to the next stage
    RECV_F = 8  # take this stage's input, sent by the previous stage
    SEND_B = 9  # send the gradient of this stage's input to the previous stage
    RECV_B = 10  # take the gradient of this stage's output, sent by the next stage


COMPUTE_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
COPY_KINDS = (Kind.OFFLOAD, Kind.RELOAD)
COMMUNICATION_KINDS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)

_PATTERN = re.compile(
    r"([0-9]{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|OFFLOAD|RELOAD|F|B|I|W|R)([0-9]{1,9})"
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Action:
    """One cell of a schedule, such as `2F0`.

    stage: index of the stage in the model, 0-based. microbatch: index in the step, 0-based.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read one action such as `3SEND_F1`; raises NotationError for anything else."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise NotationError(
                f"{text.strip()[:40]!r} is not an action: write stage, kind and microbatch, "
                f"such as 2F0 (numbers of up to 9 digits; kinds: "
                f"{', '.join(kind.name for kind in Kind)})"
            )
        stage, kind, microbatch = match.groups()
        return Action(stage=int(stage), kind=Kind[kind], microbatch=int(microbatch))
