"""Jobs run by real ranks of which one comes to grief, in an action of a chosen kind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradient_jobs import Case, make
from pipe_models import Block, batch, differences, gradients, mse, own, reference
from torch import nn

from fullbore.errors import FullboreError, RankError
from fullbore.runtime import Pipeline
from fullbore.runtime.links import IncomingLink, OutgoingLink

Deed = Callable[[], None]
TIMEOUT_S = 6.0  # where a rank is stopped
SPLIT: Case = ("split", 3, None)
FULL: Case = ("1f1b", 4, None)
# kind: schedule, rank that it strikes on two ranks, the action, and of which message or compute
KINDS: dict[str, tuple[Case, int, str]] = {
    "F": (FULL, 1, "1F1"),
    "B": (FULL, 0, "0B1"),
    "I": (SPLIT, 1, "1I1"),
    "W": (SPLIT, 0, "0W1"),
    "SEND_F": (SPLIT, 0, "0SEND_F1"),
    "RECV_F": (SPLIT, 1, "1RECV_F1"),
    "SEND_B": (SPLIT, 1, "1SEND_B1"),
    "RECV_B": (FULL, 0, "0RECV_B1"),
}


@dataclass
class Strike:
    """What happens at the second action of its kind, once it is armed."""

    kind: str = ""
    deed: Deed | None = None
    seen: int = 0

    def arm(self, kind: str, deed: Deed) -> None:
        self.kind, self.deed, self.seen = kind, deed, 0

    def at(self, *kinds: str) -> None:
        if self.kind in kinds and self.deed is not None:
            self.seen += 1
            if self.seen == 2:
                deed, self.deed = self.deed, None
                deed()


class _Entrance(torch.autograd.Function):
    """Its backward belongs to the input gradient alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strike: Strike) -> torch.Tensor:
        ctx.strike = strike
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.strike.at("B", "I")
        return grad, None


class Struck(Block):
    """A block that meets its strike in forward, input gradient or weight gradient."""

    def __init__(self, strike: Strike) -> None:
        super().__init__()
        self.strike = strike
        self.up.weight.register_post_accumulate_grad_hook(lambda _: strike.at("W"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.strike.at("F")
        return super().forward(
            _Entrance.apply(x if x.requires_grad else x.requires_grad_(), self.strike)
        )


def strike_links(strike: Strike, rank: int) -> None:
    """Links of this process meet the strike as they send or take; rank 0 sends forwards."""
    send, take = OutgoingLink.send, IncomingLink.take

    def struck_send(self: OutgoingLink, *args: Any, **kwargs: Any) -> Any:
        strike.at("SEND_F" if self.peer > rank else "SEND_B")
        return send(self, *args, **kwargs)

    def struck_take(self: IncomingLink) -> Any:
        strike.at("RECV_F" if self.peer < rank else "RECV_B")
        return take(self)

    OutgoingLink.send, IncomingLink.take = struck_send, struck_take  # type: ignore[method-assign]


class Stand:
    """A pipeline of blocks that can be struck, and its twin without one."""

    def __init__(self, rank: int, case: Case, ranks: int = 2, **options: Any) -> None:
        self.rank, self.strike, self.schedule = rank, Strike(), make(case, ranks)
        self.stages, self.twins = (self._stages() for _ in range(2))
        mine = own(self.stages, self.schedule, rank)
        self.pipe = Pipeline(mine, self.schedule, mse, **options)
        self.batch = batch(2 * self.schedule.microbatches)

    def _stages(self) -> list[nn.Module]:
        torch.manual_seed(0)
        return [Struck(self.strike) for _ in range(self.schedule.stages)]

    def step(self) -> RankError | None:
        """The error of a step, or None."""
        try:
            self.pipe.step(*self.batch)
        except RankError as error:
            return error
        return None

    def wrong(self) -> list[str]:
        """What differs from one process in the gradients of a step from zero."""
        for module in (*self.stages, *self.twins):
            module.zero_grad()
        m = self.schedule.microbatches
        x, y = self.batch
        _, expected = reference(self.twins, x.chunk(m), y.chunk(m))
        self.pipe.step(x, y)
        return differences(gradients(own(self.stages, self.schedule, self.rank)), expected)


def warm_up(stand: Stand, gate: Path, processes: int) -> None:
    """A first step, which takes long where many processes start at once, until all have done it.

    gate: a folder that the processes of all groups share.
    """
    stand.pipe.step(*stand.batch)
    stand.pipe.close()
    (gate / f"{os.getpid()}").touch()
    while len(list(gate.iterdir())) < processes:
        time.sleep(0.05)


def _raise(error: BaseException) -> None:
    raise error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("on purpose"),
    "RuntimeError": lambda: RuntimeError("on purpose"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("on purpose"),
    "MemoryError": lambda: MemoryError("on purpose"),
}


def raising(rank: int, cases: list[tuple[str, str]], folder: Path) -> list[dict[str, Any]]:
    """For each kind of action and error: a good step, one in which it is raised, a good one."""
    found = []
    stands: dict[Case, Stand] = {}
    strikes: list[Strike] = []

    def link_strike() -> Strike:
        strikes.append(Strike())
        strike_links(strikes[-1], rank)
        return strikes[-1]

    on_links = link_strike()
    for kind, name in cases:
        case, victim, _ = KINDS[kind]
        if case not in stands:
            stands[case] = Stand(rank, case, flight_record=folder / case[0])
        stand = stands[case]
        step = stand.pipe.step_number
        if rank == victim:
            for strike in (stand.strike, on_links):
                strike.arm(kind, lambda name=name: _raise(ERRORS[name]()))
        begun_s = time.monotonic()
        error = stand.step()
        took_s = time.monotonic() - begun_s
        stand.strike.deed = on_links.deed = None
        told = "none" if error is None else str(error)
        found.append({"error": told, "step": step, "took_s": took_s, "wrong": stand.wrong()})
    return found


def struck(
    rank: int,
    kind: str,
    how: str,
    note: Path,
    gate: Path,
    processes: int,
    ranks: int = 2,
    case: Case | None = None,
) -> dict[str, Any]:
    """A rank is killed or stopped in an action of this kind; what the others say, and when."""
    planned, victim, _ = KINDS[kind]
    patience_s = 60.0 if how == "killed" else TIMEOUT_S
    on_links = Strike()
    strike_links(on_links, rank)
    warm_up(Stand(rank, case or planned, ranks), gate, processes)
    stand = Stand(
        rank, case or planned, ranks, timeout_s=patience_s, flight_record=note.with_suffix(".d")
    )
    stand.pipe.step(*stand.batch)
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP

    def deed() -> None:
        note.write_text(json.dumps(time.monotonic()))
        os.kill(os.getpid(), number)

    if rank == victim:
        for strike in (stand.strike, on_links):
            strike.arm(kind, deed)
    error = stand.step()
    over_s = time.monotonic()
    struck_s = json.loads(note.read_text())
    return {"error": str(error), "after_s": over_s - struck_s}


def lost_before_receives(rank: int, victim: int, note: Path) -> dict[str, Any]:
    """A rank is killed once all have agreed on the step, before the others post its receives."""
    stand = Stand(rank, ("1f1b", 5, None), 4)
    stand.pipe.step(*stand.batch)
    expect = OutgoingLink.expect

    def late(self: OutgoingLink, *args: Any, **kwargs: Any) -> None:
        if rank == victim:
            note.write_text(json.dumps(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)  # for each of two links, so that the connections to it have broken
        expect(self, *args, **kwargs)

    OutgoingLink.expect = late  # type: ignore[method-assign]
    error = stand.step()
    return {"error": str(error), "after_s": time.monotonic() - json.loads(note.read_text())}


def stalls(rank: int, how: str, gate: Path, processes: int) -> dict[str, Any]:
    """A rank is stopped, or sleeps in its stage, for longer than the watchdog likes."""
    heard: list[str] = []
    warm_up(Stand(rank, FULL), gate, processes)
    stand = Stand(rank, FULL, 2, timeout_s=6.0, stall_timeout_s=1.0, on_stall=heard.append)
    stand.pipe.step(*stand.batch)
    if rank == 1:
        deeds: dict[str, Deed] = {
            "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "slow": lambda: time.sleep(3.0),
            "hangs": lambda: time.sleep(12.0),
        }
        stand.strike.arm("F", deeds[how])
    error = stand.step()
    return {"heard": heard, "error": str(error) if error else None}


def absent(rank: int, number: int) -> str:
    """A rank that never makes the pipeline."""
    if rank == number:
        dist.distributed_c10d.GroupMember.WORLD.get_group_store().wait(["over"])  # type: ignore
        return "was not there"
    heard: list[str] = []
    begun_s = time.monotonic()
    try:
        Stand(rank, ("1f1b", 4, None), 4, timeout_s=2.0, stall_timeout_s=0.5, on_stall=heard.append)
    except FullboreError as error:
        assert time.monotonic() - begun_s < 7
        return "\n".join([str(error), *heard])
    finally:
        store = dist.distributed_c10d.GroupMember.WORLD.get_group_store()  # type: ignore
        if store.add("left", 1) == 3:
            store.set("over", "1")
    return "no error"


def closing(rank: int, ranks: int) -> list[tuple[str, float]]:
    """Rank after rank closes a pipeline while the others go on."""
    found = []
    for closer in range(ranks):
        stand = Stand(rank, ("1f1b", 4, None), ranks)
        stand.pipe.step(*stand.batch)
        if rank == closer:
            stand.pipe.close()
        begun_s = time.monotonic()
        try:
            stand.pipe.step(*stand.batch)
            told = "no error"
        except FullboreError as error:
            told = str(error)
        found.append((told, time.monotonic() - begun_s))
    return found
