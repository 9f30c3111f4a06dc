"""What each directed pair of ranks must be able to carry: how far ahead, how much held.

The runtime sizes its receive windows by this, and the verifier judges with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fullbore.errors import VerificationError
from fullbore.ir import FlatSchedule, Kind, Schedule, dependencies
from fullbore.passes import insert_communication
from fullbore.verify.clocks import MessageOrder, known_at_send
from fullbore.verify.walk import walk

__all__ = ["LinkUse", "Messages", "links", "messages_of", "window"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One directed pair of ranks between which messages go.

    messages: how many a step. ahead: the largest number that can have been sent and not yet
    taken, in any execution, however fast or slow the ranks are. held: the largest number that
    the destination has taken and not yet consumed; at least 1, the one about to be consumed.
    taken: for each message in order, how many before it have been taken by the time it is sent,
    in any execution: the sender may let go of that many. returned: for each message in order, how
    many of the opposite link's its source has taken before sending it: once it has arrived, its
    destination may let go of that many of its own.
    """

    source: int
    destination: int
    messages: int
    ahead: int
    held: int
    taken: Indices = field(compare=False, repr=False)
    returned: Indices = field(compare=False, repr=False)


def window(link: LinkUse, *, ranks: int) -> int:
    """How many receives the runtime posts ahead on a link: no more than can be under way, or P."""
    return min(link.ahead, ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """All matched messages [n], by directed pair, then as sent; send and receive are flat indices.

    starts: where each pair begins in these arrays, and their length at the end [pairs + 1].
    """

    send: Indices
    receive: Indices
    starts: Indices


def messages_of(flat: FlatSchedule, value: Indices) -> Messages:
    """The messages of a schedule with communication; value as in `ir.Dependencies`."""
    receive = np.flatnonzero(
        ((flat.kind == Kind.RECV_F) | (flat.kind == Kind.RECV_B)) & (value >= 0)
    )
    send = value[receive]
    pair = flat.rank[send].astype(np.int64) * len(flat.offsets) + flat.rank[receive]
    order = np.lexsort((send, pair))
    changes = np.flatnonzero(np.diff(pair[order], prepend=-1))
    return Messages(send=send[order], receive=receive[order], starts=np.append(changes, len(order)))


def links(schedule: Schedule, *, rank: int | None = None) -> tuple[LinkUse, ...]:
    """The use of every directed pair of ranks that exchanges messages, by source and destination.

    rank: only the links from or to this rank, which costs a P-th. Sends are asynchronous. A
    schedule of compute actions is given its communication first. It must be lawful (see `check`);
    VerificationError where it cannot finish. `ahead` is exact: when a message is sent, whatever
    need not have happened before can still be missing, so vector clocks count the messages that
    must have been taken by then. Costs O(messages x P).
    """
    channelled = insert_communication(schedule)
    flat = channelled.flat()
    value = dependencies(channelled).value
    messages = messages_of(flat, value)
    spans = [span for span in _spans(messages) if _touches(flat, messages, span, rank)]
    destinations = np.unique([flat.rank[messages.receive[span.start]] for span in spans])
    known = _known_of_destination(schedule.name, flat, messages, destinations.astype(np.int64))
    held = _held(flat, value, messages)
    received = _received_by_pair(flat, messages)
    none = np.zeros(0, dtype=np.int64)

    def use(span: slice) -> LinkUse:
        taken = np.searchsorted(messages.receive[span], known[span])
        source = int(flat.rank[messages.send[span.start]])
        destination = int(flat.rank[messages.receive[span.start]])
        opposite = received.get((destination, source), none)
        return LinkUse(
            source=source,
            destination=destination,
            messages=len(taken),
            ahead=int((np.arange(1, len(taken) + 1) - taken).max()),
            held=int(held[span].max()),
            taken=taken,
            returned=np.searchsorted(opposite, messages.send[span]),
        )

    return tuple(use(span) for span in spans)


def _spans(messages: Messages) -> list[slice]:
    """Where each directed pair's messages are."""
    return [slice(start, stop) for start, stop in pairwise(messages.starts.tolist())]


def _received_by_pair(flat: FlatSchedule, messages: Messages) -> dict[tuple[int, int], Indices]:
    """Where each directed pair's messages are taken, as flat indices in order."""
    return {
        (int(flat.rank[messages.send[span.start]]), int(flat.rank[messages.receive[span.start]])): (
            messages.receive[span]
        )
        for span in _spans(messages)
    }


def _touches(flat: FlatSchedule, messages: Messages, span: slice, rank: int | None) -> bool:
    ends = (flat.rank[messages.send[span.start]], flat.rank[messages.receive[span.start]])
    return rank is None or rank in ends


def _known_of_destination(
    name: str, flat: FlatSchedule, messages: Messages, destinations: Indices
) -> Indices:
    """For each message [n]: the flat index up to which its destination must have run by then."""
    needs = np.full(len(flat.kind), -1, dtype=np.int64)
    needs[messages.receive] = messages.send
    walked = walk(flat, needs)
    if (walked.reached < flat.offsets[1:]).any():
        raise VerificationError(f"{name} cannot finish: verify.check says where each rank stops")
    number = np.full(len(flat.kind), -1, dtype=np.int64)
    number[messages.send] = number[messages.receive] = np.arange(len(messages.send))
    at = walked.order[number[walked.order] >= 0]
    order = MessageOrder(
        at=at,
        rank=flat.rank[at].astype(np.int64),
        message=number[at],
        is_send=needs[at] < 0,
        destination=flat.rank[messages.receive].astype(np.int64),
    )
    return known_at_send(order, flat.offsets, destinations)


def _held(flat: FlatSchedule, value: Indices, messages: Messages) -> Indices:
    """For each message [n]: how many of its link are taken and not consumed once it is taken."""
    consumer_of = np.full(len(flat.kind), -1, dtype=np.int64)
    computes = np.flatnonzero((flat.kind < Kind.SEND_F) & (value >= 0))
    consumer_of[value[computes]] = computes
    consumer = consumer_of[messages.receive]
    held = np.empty(len(consumer), dtype=np.int64)
    for span in _spans(messages):
        consumed = np.searchsorted(np.sort(consumer[span]), messages.receive[span])
        held[span] = np.arange(1, len(consumed) + 1) - consumed
    return held
