"""The event engine: runs the programs of all ranks against the clock, in time linear in actions.

Programs fix the order on every rank, and a directed link belongs to the one rank that sends on it,
as the channel to its host does. So nothing ever competes, and no heap of events is needed: each
rank runs until it waits for something that is not there yet, and whoever makes it wakes the rank
up again.

The function below is plain Python over indexable things. Small schedules run it on lists as it
stands; large ones run it through numba, on arrays (see `engine`). It must stay within what numba
compiles.
"""

from __future__ import annotations

from typing import Any

__all__ = ["run_programs"]


def run_programs(
    offsets: Any,  # [P + 1] where each rank's actions begin
    provider: Any,  # [N] the action that hands over the input, or -1
    reload: Any,  # [N] the copy of its own rank that must be over, or -1
    reader: Any,  # [N] the other rank that takes the result as a message, or -1
    link: Any,  # [N] the directed link which that message, or channel which a copy takes, or -1
    occupancy_s: Any,  # [N] time for which the message or the copy keeps it busy
    duration_s: Any,  # [N]
    lead_s: Any,  # [N] host time before the action
    hop_s: float,  # latency of a message, after it has left
    blocking: bool,  # noqa: FBT001 (numba has no keyword-only): senders wait for the arrival
    reached_s: Any,  # out [N] when the rank came to the action, ready to wait for its input
    start_s: Any,  # out [N]
    end_s: Any,  # out [N]
    left_s: Any,  # out [N] when the message had left
    usable_s: Any,  # out [N] when the result is there for whoever needs it; filled with -1 before
    position: Any,  # out [P] where each rank stopped: offsets[1:] if all went well; zeros before
    awaited: Any,  # scratch [P], filled with -1
    clock_s: Any,  # scratch [P], zeros
    link_free_s: Any,  # scratch [links], zeros
    runnable: Any,  # scratch [P]
) -> None:
    """Give every action its times; ranks that can never go on stop at their `position`."""
    ranks = len(position)
    for rank in range(ranks):
        position[rank] = offsets[rank]
        runnable[rank] = ranks - 1 - rank
    waiting = ranks
    while waiting > 0:
        waiting -= 1
        rank = runnable[waiting]
        now = clock_s[rank]
        index = position[rank]
        while index < offsets[rank + 1]:
            source = provider[index]
            if source >= 0 and usable_s[source] < 0.0:
                awaited[rank] = source
                break
            reached_s[index] = now
            if source >= 0 and usable_s[source] > now:
                now = usable_s[source]
            if reload[index] >= 0 and usable_s[reload[index]] > now:
                now = usable_s[reload[index]]
            now += lead_s[index]
            start_s[index] = now
            now += duration_s[index]
            end_s[index] = now
            usable = now
            other = reader[index]
            if link[index] >= 0:
                entered = max(now, link_free_s[link[index]])
                left = entered + occupancy_s[index]
                link_free_s[link[index]] = left
                left_s[index] = left
                if other < 0:  # a copy
                    usable = left
                    start_s[index] = entered
                    end_s[index] = left
                else:
                    usable = left + hop_s
                    if blocking:
                        now = usable
            usable_s[index] = usable
            if other >= 0 and awaited[other] == index:
                awaited[other] = -1
                runnable[waiting] = other
                waiting += 1
            index += 1
        position[rank] = index
        clock_s[rank] = now
