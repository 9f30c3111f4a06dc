"""The meeting of all ranks before a pipeline is wired: who is missing, and who objects.

It goes through the rendezvous store alone: what one rank is given wrongly must be refused by
every rank before connections are made, since the others would wait in them for a rank that has
given up already. One rank reads what every rank says and tells the verdict, so P ranks exchange 2P
messages.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from torch._C._distributed_c10d import Store

from fullbore.errors import RankError

__all__ = ["Patience", "Said", "meet"]

_VERDICT = "verdict"
_POLL_S, _POLL_MOST_S = 0.001, 0.05
_SLACK_S = 3.0  # for the verdict to come


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one rank says: its objection if it has one, and what must be the same on all ranks.

    common: by the words that name each argument. place: the rank within its pipeline, and
    weights: what all replicas of that rank must have alike. recompute: of how many blocks of a
    stage, 0 where it is not said in blocks, and blocks: how many its largest stage has, 0 where
    none are known.
    """

    objection: str | None
    common: Mapping[str, str]
    place: int = 0
    weights: str = ""
    recompute: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long ranks wait for one another, and whom they tell that they do.

    stall_s: after how long a wait is worth a word; None: never.
    """

    timeout_s: float
    stall_s: float | None
    on_stall: Callable[[str], None]


def meet(
    store: Store, said: Said, *, rank: int, numbers: Sequence[int], patience: Patience
) -> list[str]:
    """Wait for all ranks; returns the objections of all, the same everywhere (none: all is well).

    numbers: of all ranks, of which the first reads and tells; rank: the number of this one.
    Raises RankError on every rank that came if one does not come in time.
    """
    store.set(f"here/{rank}", json.dumps(asdict(said)))
    teller = numbers[0]
    if rank == teller:
        missing = _wait(store, [f"here/{r}" for r in numbers], patience, teller=teller)
        told = {} if missing else {r: _read(store, r) for r in sorted(numbers)}
        absent = [int(key.removeprefix("here/")) for key in missing]
        store.set(_VERDICT, json.dumps({"absent": absent, "objections": _objections(told)}))
    elif _wait(store, [_VERDICT], patience):
        raise _absence([teller], patience)
    verdict = json.loads(store.get(_VERDICT))
    if verdict["absent"]:
        raise _absence(verdict["absent"], patience)
    objections: list[str] = verdict["objections"]
    return objections


def _wait(
    store: Store, keys: Sequence[str], patience: Patience, *, teller: int | None = None
) -> list[str]:
    """Wait until all keys are in the store; those that did not come in time.

    teller: this rank's number if it speaks for all; the others wait a little longer, in silence.
    """
    begun_s, poll_s, told = time.monotonic(), _POLL_S, 0
    missing, limit_s = list(keys), patience.timeout_s + (_SLACK_S if teller is None else 0.0)
    while missing := [key for key in missing if not store.check([key])]:
        waited_s = time.monotonic() - begun_s
        if waited_s > limit_s:
            break
        if patience.stall_s is not None and waited_s > patience.stall_s * 2**told:
            told += 1
            if teller is not None:
                patience.on_stall(_still_waiting(teller, missing, waited_s, patience))
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, _POLL_MOST_S)
    return missing


def _still_waiting(teller: int, missing: Sequence[str], waited_s: float, patience: Patience) -> str:
    ranks = ", ".join(key.removeprefix("here/") for key in missing)
    return (
        f"rank {teller} has waited {waited_s:.0f} s for rank {ranks} to make the pipeline; the "
        f"wait ends after {patience.timeout_s:g} s"
    )


def _read(store: Store, rank: int) -> Said:
    return Said(**json.loads(store.get(f"here/{rank}")))


def _objections(told: Mapping[int, Said]) -> list[str]:
    objections = [f"rank {rank}: {s.objection}" for rank, s in told.items() if s.objection]
    names = list(dict.fromkeys(name for said in told.values() for name in said.common))
    objections += [
        f"the ranks were given different {what}"
        for what in names
        if len({s.common[what] for s in told.values() if what in s.common}) > 1
    ]
    return objections + _unlike_replicas(told) + _too_many_blocks(told)


def _too_many_blocks(told: Mapping[int, Said]) -> list[str]:
    """More blocks than any stage has would be all of them, which has a name of its own."""
    asked = max((said.recompute for said in told.values()), default=0)
    most = max((said.blocks for said in told.values()), default=0)
    if asked <= most or not most or any(said.objection for said in told.values()):
        return []
    return [
        f"recompute={asked}, and no stage has more than {most} blocks: the nearest legal values "
        f'are {most} and "full"'
    ]


def _unlike_replicas(told: Mapping[int, Said]) -> list[str]:
    objections = []
    first: dict[int, int] = {}
    for rank, said in told.items():
        other = first.setdefault(said.place, rank)
        if told[other].weights != said.weights:
            objections.append(
                f"ranks {other} and {rank} are replicas of one another, but their stages have "
                "different weights"
            )
    return objections


def _absence(absent: Sequence[int], patience: Patience) -> RankError:
    others = f" (nor did {', '.join(map(str, absent[1:]))})" if len(absent) > 1 else ""
    return RankError(
        rank=absent[0],
        action="making the pipeline",
        cause=(
            f"it did not come within {patience.timeout_s:g} s{others}: was it started, and did it "
            "end before it came here?"
        ),
    )
