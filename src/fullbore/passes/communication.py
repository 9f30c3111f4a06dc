"""Sends and receives: written into a schedule of compute actions, or taken out of one.

    rank 0  0F0 0F1 0B0 0B1           rank 0  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...
    rank 1  1F0 1B0 1F1 1B1     ->    rank 1  1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 ...

A send stands right after the compute that makes its tensor, since sends cost the sender no time.
A receive stands right before the compute that needs its tensor, since nothing not yet needed may
stand before a computation that is ready. Messages between two ranks arrive in the order in which
they were sent; where one is needed before an earlier one, the earlier one is taken just before
it, and held. So receives never wait for more than the computation after them would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fullbore.ir import FlatSchedule, Kind, Program, Schedule, dependencies

__all__ = ["insert_communication", "strip_communication"]

Indices = npt.NDArray[np.int64]

# The kind of the message that a compute action takes, or sends, by the action's kind.
_RECEIVE = np.array([Kind.RECV_F, Kind.RECV_B, Kind.RECV_B, Kind.RECV_B], dtype=np.int8)
_SEND = np.array([Kind.SEND_F, Kind.SEND_B, Kind.SEND_B, Kind.SEND_B], dtype=np.int8)


def strip_communication(schedule: Schedule) -> Schedule:
    """The same schedule without sends and receives; costs one copy."""
    return replace(
        schedule,
        programs=tuple(p.select(p.kind < Kind.SEND_F) for p in schedule.programs),
    )


def insert_communication(schedule: Schedule) -> Schedule:
    """The same schedule with every message between two ranks as a SEND and a RECV.

    A schedule in which sends or receives are already written out is returned as it is. Stages
    on one rank hand over without a message. The schedule need not be lawful: a message whose
    producer or consumer is missing is left out, for `verify` to report. Linear in actions.
    """
    if schedule.has_communication:
        return schedule
    flat = schedule.flat()
    messages = _messages(schedule, flat)
    places = _places(messages, len(flat.kind))
    kind, stage, microbatch = (
        np.empty(len(flat.kind) + 2 * len(messages.producer), dtype=column.dtype)
        for column in (flat.kind, flat.stage, flat.microbatch)
    )
    for place, source, kinds in (
        (places.compute, np.arange(len(flat.kind)), flat.kind),
        (places.send, messages.producer, _SEND[flat.kind[messages.producer]]),
        (places.receive, messages.consumer, _RECEIVE[flat.kind[messages.consumer]]),
    ):
        kind[place], stage[place] = kinds, flat.stage[source]
        microbatch[place] = flat.microbatch[source]
    lengths = np.diff(flat.offsets)
    lengths += np.bincount(flat.rank[messages.producer], minlength=schedule.ranks)
    lengths += np.bincount(flat.rank[messages.consumer], minlength=schedule.ranks)
    joined = Program(kind=kind, stage=stage, microbatch=microbatch)
    return replace(schedule, programs=_split(joined, lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Messages:
    """Messages [n] sorted by directed pair of ranks, then as sent; indices are flat ones.

    taken_at: the compute action before which the destination takes the message.
    """

    producer: Indices
    consumer: Indices
    taken_at: Indices


def _messages(schedule: Schedule, flat: FlatSchedule) -> _Messages:
    value = dependencies(schedule).value
    consumer = np.flatnonzero(value >= 0)
    consumer = consumer[flat.rank[value[consumer]] != flat.rank[consumer]]
    consumer_of = np.full(len(value), -1, dtype=np.int64)
    consumer_of[value[consumer]] = consumer
    producer = np.flatnonzero(consumer_of >= 0)
    order = np.argsort(
        flat.rank[consumer_of[producer]].astype(np.min_scalar_type(schedule.ranks)), kind="stable"
    )
    producer = producer[order]  # by destination, and within it still by source and as sent
    consumer = consumer_of[producer]
    pair = flat.rank[consumer].astype(np.int64) * schedule.ranks + flat.rank[producer]
    return _Messages(
        producer=producer, consumer=consumer, taken_at=_earliest_of_the_rest(consumer, pair)
    )


def _earliest_of_the_rest(consumer: Indices, pair: Indices) -> Indices:
    """For each message, the first consumer among it and those sent after it, on its pair.

    Pairs ascend, so that a running minimum from the end starts afresh at each pair once its
    number outweighs every index.
    """
    weight = pair * (consumer.max(initial=0) + 1)
    earliest: Indices = np.minimum.accumulate((consumer + weight)[::-1])[::-1] - weight
    return earliest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Flat indices in the new schedule: of each compute action [N], each send and receive [n]."""

    compute: Indices
    send: Indices
    receive: Indices


def _places(messages: _Messages, actions: int) -> _Places:
    """Receives go before, and sends after, the compute action that each belongs to."""
    before = np.bincount(messages.taken_at, minlength=actions)
    after = np.bincount(messages.producer, minlength=actions)
    compute = np.arange(actions) + np.cumsum(before) + np.cumsum(after) - after
    count = np.arange(len(messages.taken_at))
    starts = np.diff(messages.taken_at, prepend=-1) != 0
    nth = count - np.maximum.accumulate(np.where(starts, count, 0))
    return _Places(
        compute=compute,
        send=compute[messages.producer] + 1,
        receive=compute[messages.taken_at] - before[messages.taken_at] + nth,
    )


def _split(joined: Program, lengths: npt.NDArray[np.int64]) -> tuple[Program, ...]:
    ends = np.cumsum(lengths).tolist()
    return tuple(
        Program(
            kind=joined.kind[start:end],
            stage=joined.stage[start:end],
            microbatch=joined.microbatch[start:end],
        )
        for start, end in zip([0, *ends], ends, strict=False)
    )
