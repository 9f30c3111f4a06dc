"""The watchdog: a thread a rank that answers for it, and says so when a step stands still.

It looks every half second at where its rank is, which costs the rank nothing. It answers when
another rank asks who lives; it closes this rank's connections when a failure is on record, so that
a rank that waits for one that was stopped does not wait on; and it tells who waits for whom once
nothing has moved for `stall_timeout_s`, and again whenever that has lasted twice as long.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Protocol

from fullbore.runtime.flight import Flight, describe_step, last_known
from fullbore.runtime.witness import Witness

__all__ = ["OnStall", "Watchdog", "Watched", "log_stall"]

OnStall = Callable[[str], None]
_LOOK_S = 0.5


def log_stall(words: str) -> None:
    """Where nobody else asked to be told: to the log."""
    logging.getLogger("fullbore.runtime").warning(words)


class Watched(Protocol):
    """What a watchdog sees of its rank's session."""

    def place(self) -> Hashable | None:
        """What changes whenever the rank moves on; None while it is in no call of the pipeline."""

    def flight(self) -> Flight:
        """What the rank is doing."""

    def interrupt(self) -> None:
        """Close its connections, so that it stops waiting."""


class Watchdog:
    """Watches one session until it is stopped; holds it weakly.

    stall_timeout_s: None for no word about stalls. on_stall is called in the watchdog's thread, on
    one rank for all. timeout_s: how long ranks wait, to be told.
    """

    def __init__(
        self,
        watched: Watched,
        witness: Witness,
        *,
        stall_timeout_s: float | None,
        on_stall: OnStall,
        timeout_s: float,
    ) -> None:
        self._watched, self._witness = weakref.ref(watched), witness
        self._stall_s, self._on_stall, self._timeout_s = stall_timeout_s, on_stall, timeout_s
        self._place: Hashable | None = None
        self._since_s = time.monotonic()
        self._told = self._answered = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fullbore-watchdog", daemon=True)
        self._thread.start()
        self.stop = weakref.finalize(self, _stop, self._over, self._thread)

    def still_s(self) -> float:
        """How long nothing has moved, to half a second."""
        return time.monotonic() - self._since_s

    # -- behind it ---------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            watched = self._watched()
            if watched is None:
                return
            try:
                self._look(watched)
            except (RuntimeError, ValueError):
                return  # the store is gone: whoever waits will find out
            del watched

    def _look(self, watched: Watched) -> None:
        place = watched.place()
        if place is None or place != self._place:
            self._place, self._since_s, self._told = place, time.monotonic(), 0
        question = self._witness.asked()
        if question > self._answered:
            self._answered = question
            self._witness.tell(self._flight(watched, question))
            if place is not None and self._witness.failed():
                watched.interrupt()
        if place is not None and self._stall_s is not None:
            self._judge_stall(watched, self._stall_s)

    def _flight(self, watched: Watched, question: int) -> Flight:
        return replace(watched.flight(), asked=question, still_s=self.still_s())

    def _judge_stall(self, watched: Watched, stall_s: float) -> None:
        if self.still_s() < stall_s * 2**self._told:
            return
        self._told += 1
        flight = watched.flight()
        if not self._witness.speaks(f"{flight.step}/{flight.evaluating}/{self._told}"):
            return
        question = self._witness.ask()
        self._answered = question
        self._witness.tell(self._flight(watched, question))
        answers = self._witness.hear(question)
        if watched.place() == self._place:  # it may have gone on meanwhile
            self._on_stall(self._describe(answers, flight))

    def _describe(self, answers: dict[int, Flight], mine: Flight) -> str:
        still_s = max((told.still_s or 0.0 for told in answers.values()), default=0.0)
        lines = [f"{describe_step(mine)} has stood still for {still_s:.0f} s:"]
        for rank in sorted(self._witness.numbers):
            if rank in answers:
                lines.append(f"  rank {rank} {_doing(answers[rank], answers)}")
            else:
                lines.append(f"  rank {rank} gives no sign of life: {last_known(rank, answers)}")
        lines.append(f"the wait ends after {self._timeout_s:g} s")
        return "\n".join(lines)


def _doing(flight: Flight, answers: dict[int, Flight]) -> str:
    still = f"{flight.still_s or 0.0:.0f} s"
    if flight.waits_for is None:
        return f"has been in {flight.now} for {still}"
    owed = f" to do {flight.owed}" if flight.owed else ""
    return (
        f"has waited {still} in {flight.now} for rank {flight.waits_for}{owed}; "
        f"last known of it: {_last_of(flight.waits_for, answers)}"
    )


def _last_of(rank: int, answers: dict[int, Flight]) -> str:
    return f"it is in {answers[rank].now}" if rank in answers else last_known(rank, answers)


def _stop(over: threading.Event, thread: threading.Thread) -> None:
    over.set()
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)
