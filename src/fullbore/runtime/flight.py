"""Flight records: what each rank was doing when something went wrong, as a file and as a line.

A rank keeps nothing for this while it works: its program is fixed, so the index of the action in
hand says which actions came before it. Only where a step is recorded anyway are there times.
A rank that was killed leaves no record; what its peers last got from it stands in its place.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fullbore.errors import RankError
from fullbore.ir import Action, Kind, Schedule

__all__ = [
    "Flight",
    "describe_step",
    "last_known",
    "program_part",
    "source_of",
    "story_of",
    "write_flight",
    "write_story",
]

_LAST, _NEXT = 8, 3  # actions told before and after the one in hand
_SHOWN = 16  # ranks in a message; files have all


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """What one rank is doing, as far as it knows itself.

    Ranks go by their numbers in the job. phase: the part of the step, in words. action: in hand,
    None outside of the actions; done: those before it, oldest first; coming: after it.
    still_s: how long nothing has moved, as far as the watchdog has seen. waits: whether
    it waits for other ranks; waits_for: for which, where that is one, and owed what that one has to
    do. got: by peer, the last action whose result
    came from there. spans: action, begin and end (None: not yet) in seconds of the recorder's
    clock, with record=True. error: what it ran into.
    asked: the number of the question that this answers. step: None where no step is meant.
    """

    rank: int
    step: int | None
    evaluating: bool
    phase: str
    action: str | None = None
    done: tuple[str, ...] = ()
    coming: tuple[str, ...] = ()
    still_s: float | None = None
    waits: bool = False
    waits_for: int | None = None
    owed: str | None = None
    got: Mapping[int, str] = field(default_factory=dict)
    spans: tuple[tuple[str, float | None, float | None], ...] = ()
    error: str | None = None
    asked: int = 0
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    written: str = field(default_factory=lambda: datetime.now(UTC).isoformat())

    def to_json(self) -> str:
        """As text; `from_json` reads it."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Flight:
        """The reverse of `to_json`."""
        told: dict[str, Any] = json.loads(text)
        told["got"] = {int(peer): action for peer, action in told["got"].items()}
        for name in ("done", "coming"):
            told[name] = tuple(told[name])
        told["spans"] = tuple((action, start, end) for action, start, end in told["spans"])
        return Flight(**told)

    @property
    def now(self) -> str:
        """What it has in hand, in a word or a few."""
        return self.action or self.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPart:
    """The surroundings of one action in a rank's program, as `Flight` has them."""

    done: tuple[str, ...]
    coming: tuple[str, ...]
    got: dict[int, str]


def program_part(schedule: Schedule, actions: Sequence[Action], at: int) -> ProgramPart:
    """What lies around action number `at` of one rank's program, sends and receives in place."""
    sources = (source_of(schedule, action) for action in actions[:at])
    return ProgramPart(
        done=tuple(map(str, actions[max(0, at - _LAST) : at])),
        coming=tuple(map(str, actions[at + 1 : at + 1 + _NEXT])),
        got={source.rank: str(source.action) for source in sources if source is not None},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the message of a receive comes from: a rank, and the action that makes it."""

    rank: int
    action: Action


def source_of(schedule: Schedule, action: Action) -> Source | None:
    """Which rank owes a receive its message, and by which compute; None for other actions."""
    match action.kind:
        case Kind.RECV_F:
            stage, kind = action.stage - 1, Kind.F
        case Kind.RECV_B:
            stage, kind = action.stage + 1, Kind.I if schedule.splits_backward else Kind.B
        case _:
            return None
    made_by = Action(stage=stage, kind=kind, microbatch=action.microbatch)
    return Source(rank=schedule.placement.stage_to_rank[stage], action=made_by)


def describe_step(flight: Flight) -> str:
    """Which step a rank is in, in words."""
    before = "an evaluation before " if flight.evaluating else ""
    return f"{before}step {flight.step}"


def story_of(
    flights: Mapping[int, Flight],
    *,
    numbers: Sequence[int],
    culprit: int | None,
    folder: Path | None,
) -> list[str]:
    """One line a rank about what it was doing last, the culprit's marked.

    flights: of those that could tell. numbers: of all ranks; where there are many,
    those around the culprit are shown. folder: where the files lie.
    """
    everyone = sorted(numbers)
    middle = everyone.index(culprit) if culprit in everyone else 0
    first = max(0, min(middle - _SHOWN // 2, len(everyone) - _SHOWN))
    shown = everyone[first : first + _SHOWN]
    lines = ["last actions of every rank, the one in hand behind the bar:"]
    lines += [_line(rank, flights, failed=rank == culprit) for rank in shown]
    if len(shown) < len(everyone):
        lines.append(f"  ... and {len(everyone) - len(shown)} ranks more")
    if folder is not None:
        lines.append(f"flight records: {folder}")
    return lines


def _line(rank: int, flights: Mapping[int, Flight], *, failed: bool) -> str:
    mark = "> " if failed else "  "
    flight = flights.get(rank)
    if flight is None:
        return f"{mark}rank {rank}: has left no word; {last_known(rank, flights)}"
    done = " ".join(flight.done) or "nothing yet"
    hand = flight.now
    if flight.waits_for is not None:
        owed = f" to do {flight.owed}" if flight.owed else ""
        hand += f", waiting for rank {flight.waits_for}{owed}"
    if flight.still_s is not None and flight.still_s >= 1:
        hand += f", for {flight.still_s:.0f} s"
    return f"{mark}rank {rank}: {done} | {hand}"


def last_known(rank: int, flights: Mapping[int, Flight]) -> str:
    """What the others know of a rank that is silent: the last that each got from it."""
    known = [
        f"rank {peer} last got {flight.got[rank]} from it"
        for peer, flight in sorted(flights.items())
        if rank in flight.got
    ]
    return ", ".join(known) or "nobody got anything from it in this step"


def write_flight(folder: Path, flight: Flight) -> None:
    """Write one rank's record as FOLDER/rank0.json; OSError where that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(flight), indent=1)
    (folder / f"rank{flight.rank}.json").write_text(text + "\n", encoding="utf-8")


def write_story(folder: Path, error: RankError) -> None:
    """Write the message for all ranks as FOLDER/story.txt; OSError where that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "story.txt").write_text(f"{error}\n", encoding="utf-8")
