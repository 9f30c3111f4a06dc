"""The witness: what a rank says about a failure in the rendezvous store, and finds out there.

The rank where a failure begins writes its verdict down first and closes its connections then; its
peers notice, and read. A connection that closes without a verdict belongs to a rank that died. A
wait that runs out of time belongs to whoever stands at the end of the chain of waits: every rank
that lives answers a question (its watchdog does, whatever the rank itself is doing), so a rank
that gives no answer is the one that stands still.

The store may die with the rank that keeps it, or be out of reach: every talk with it has an end.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from fullbore.errors import RankError
from fullbore.runtime.flight import Flight, story_of, write_flight, write_story

__all__ = ["DIED", "StoreLostError", "Witness"]

T = TypeVar("T")

ANSWER_S = 1.5  # within which every rank that lives has answered a question, or said why it fails
_GIVE_UP_S = 3.5
_STORY_S = 2.0
_BOUND_S = 4.0
_ANY = 2**31  # answers every question: what a rank says that has failed
_POLL_S = 0.02
_FAILURE, _STORY, _QUESTION = "failure", "story", "question"


class StoreLostError(RuntimeError):
    """The rendezvous store does not answer."""


class Witness:
    """One rank's side of all talk about failures, for one life of a pipeline.

    numbers: of all ranks of the job; rank: the number of this one. folder: where flight records go;
    None: nowhere.
    """

    def __init__(
        self, store: Store, *, rank: int, numbers: Sequence[int], folder: Path | None = None
    ) -> None:
        self.rank, self.numbers, self._store, self._folder = rank, tuple(numbers), store, folder
        self._reporter = self._lost = False

    # -- what is asked and answered while ranks live --------------------------------------------

    def ask(self) -> int:
        """Ask every rank what it is doing; returns the number of the question."""
        return self._store.add(_QUESTION, 1)

    def asked(self) -> int:
        """The number of the newest question, 0 before the first."""
        return self._store.add(_QUESTION, 0) if self._store.check([_QUESTION]) else 0

    def tell(self, flight: Flight) -> None:
        """Say what this rank is doing."""
        self._store.set(f"flight/{self.rank}", flight.to_json())

    def flights(self) -> dict[int, Flight]:
        """What each rank said last, of those that said anything."""
        keys = [f"flight/{rank}" for rank in self.numbers]
        there = [key for key in keys if self._store.check([key])]
        found = [Flight.from_json(self._store.get(key)) for key in there]
        return {flight.rank: flight for flight in found}

    def hear(self, question: int, *, limit_s: float = ANSWER_S) -> dict[int, Flight]:
        """The answers to a question: all of them, or those that came in time."""
        end_s = time.monotonic() + limit_s
        while True:
            answers = {r: f for r, f in self.flights().items() if f.asked >= question}
            if len(answers) == len(self.numbers) or time.monotonic() > end_s:
                return answers
            time.sleep(_POLL_S)

    def failed(self) -> bool:
        """Whether some rank has told a failure."""
        return self._store.check([_FAILURE])

    def speaks(self, about: str) -> bool:
        """Whether this rank is the one to speak about something; the first that asks is."""
        return (
            self._store.compare_set(f"speaker/{about}", "", str(self.rank))
            == str(self.rank).encode()
        )

    def say_closed(self) -> None:
        """Leave word that this rank closed its pipeline."""
        with suppress(StoreLostError):  # then the others have gone, or will find out
            self._bounded(lambda: self._store.set(f"closed/{self.rank}", "1"))

    # -- what is said of a failure ----------------------------------------------------------------

    def report(
        self, flight: Flight, *, rank: int | None, action: str | None, cause: str
    ) -> RankError:
        """Record that a rank failed, unless a failure is on record; return the one on record."""
        mine = _verdict(flight, rank=rank, action=action, cause=cause)
        try:
            return self._bounded(lambda: self._confess(mine, flight))
        except StoreLostError:
            return mine  # say what we know

    def explain(self, flight: Flight, *, suspects: Sequence[int]) -> RankError:
        """Find out why this rank waited in vain for one of the suspects."""
        try:
            verdict = self._bounded(lambda: self._find_out(flight, suspects))
        except StoreLostError as gone:
            how = (
                "no sign of life within timeout_s" if _is_late(flight) else "its connection closed"
            )
            cause = f"{how}, and {gone}; rank {self.rank} was waiting for it"
            suspect = suspects[0] if suspects else None
            return _verdict(flight, rank=suspect, action=flight.owed, cause=cause)
        return verdict

    def conclude(self, verdict: RankError, flight: Flight) -> RankError:
        """The verdict with the story of all ranks, the same everywhere; writes the records."""
        try:
            told = self._bounded(lambda: self._story(verdict, flight))
        except StoreLostError:
            told = self._compose(verdict, {self.rank: flight})
        error = RankError(**{**verdict.state(), "story": told})
        self._write(flight, error)
        return error

    # -- behind them --------------------------------------------------------------------------

    def _confess(self, verdict: RankError, flight: Flight) -> RankError:
        self.tell(replace(flight, asked=_ANY))
        return self._record(verdict)

    def _find_out(self, flight: Flight, suspects: Sequence[int]) -> RankError:
        """Wait for a verdict; without one, ask who lives."""
        self.tell(replace(flight, asked=_ANY))
        self._store.set(f"down/{self.rank}", "1")
        begun_s = time.monotonic()
        question = self.ask()
        while (waited_s := time.monotonic() - begun_s) < _GIVE_UP_S:
            if self.failed():
                return self._recorded()
            closed = [rank for rank in suspects if self._store.check([f"closed/{rank}"])]
            if closed:
                return self._blame(flight, closed[0], None, _CLOSED)
            if waited_s > ANSWER_S:
                found = self._judge(flight, suspects, question)
                if found is not None:
                    return found
            time.sleep(_POLL_S)
        cause = f"a connection broke, yet both its ends are alive: the network? ({flight.error})"
        return self._blame(flight, self.rank, flight.now, cause)

    def _judge(self, flight: Flight, suspects: Sequence[int], question: int) -> RankError | None:
        """Who is to blame by what the ranks have answered; None: wait on."""
        answers = {r: f for r, f in self.flights().items() if f.asked >= question}
        answers[self.rank] = flight
        if not _is_late(flight):
            silent = [r for r in suspects if r not in answers and not self._is_down(r)]
            return self._record_dead(flight, silent[0]) if silent else None
        return self._judge_late(flight, _to_blame(suspects, answers, numbers=self.numbers), answers)

    def _judge_late(self, flight: Flight, rank: int, answers: dict[int, Flight]) -> RankError:
        if rank not in answers:
            how = "no sign of life within timeout_s (does it hang, or was it stopped?)"
            return self._record_silent(flight, rank, answers, how)
        found = answers[rank]
        if rank == self.rank:  # in a stage of its own that talks to other ranks by itself
            return self._blame(flight, rank, flight.now, flight.error or "")
        cause = f"it hangs{_since(found)}; rank {self.rank} waited for it until timeout_s was over"
        if (found.still_s or 0.0) < ANSWER_S:
            cause = f"it was too slow for rank {self.rank}, which waits for timeout_s and no longer"
        elif found.waits:
            cause = "ranks wait for each other, longer than timeout_s"
        return self._blame(flight, rank, found.now, cause)

    def _record_dead(self, flight: Flight, rank: int) -> RankError:
        return self._record_silent(flight, rank, {self.rank: flight}, DIED)

    def _record_silent(
        self, flight: Flight, rank: int, answers: dict[int, Flight], how: str
    ) -> RankError:
        waiting = sorted(r for r, f in answers.items() if f.waits_for == rank) or [self.rank]
        owed = next((answers[r].owed for r in waiting if r in answers and answers[r].owed), None)
        cause = f"{how}; rank {waiting[0]} was waiting for it"
        last = next((answers[r].got[rank] for r in waiting if rank in _got(answers, r)), None)
        action = f"{owed} or before" if owed else last and f"an action after {last}"
        return self._blame(flight, rank, action, cause)

    def _blame(self, flight: Flight, rank: int, action: str | None, cause: str) -> RankError:
        return self._record(_verdict(flight, rank=rank, action=action, cause=cause))

    def _record(self, verdict: RankError) -> RankError:
        """Write a verdict down unless there is one; the one that stands."""
        told = json.dumps({**verdict.state(), "reporter": self.rank})
        kept = json.loads(self._store.compare_set(_FAILURE, "", told))
        self._reporter = kept["reporter"] == self.rank
        self._store.add(_QUESTION, 1)  # what is everyone doing?
        return RankError(**kept)

    def _is_down(self, rank: int) -> bool:
        """Whether a rank has said that it, too, lost a connection."""
        return self._store.check([f"down/{rank}"])

    def _recorded(self) -> RankError:
        return RankError(**json.loads(self._store.get(_FAILURE)))

    def _story(self, verdict: RankError, flight: Flight) -> list[str]:
        """The story that the reporter composes, for everyone."""
        if self._reporter:
            story = self._compose(verdict, self._gathered(verdict, flight))
            self._store.set(_STORY, json.dumps(story))
            return story
        end_s = time.monotonic() + _STORY_S
        while time.monotonic() < end_s:
            if self._store.check([_STORY]):
                found: list[str] = json.loads(self._store.get(_STORY))
                return found
            time.sleep(_POLL_S)
        return self._compose(verdict, self._gathered(verdict, flight, limit_s=0))

    def _gathered(
        self, verdict: RankError, flight: Flight, *, limit_s: float = ANSWER_S
    ) -> dict[int, Flight]:
        """All ranks' flights of this step, waiting a little for those that may still come."""
        silent = {verdict.rank} - {self.rank}  # who let others report it will not come
        end_s = time.monotonic() + limit_s
        while True:
            found = {**self.flights(), self.rank: flight}
            if set(self.numbers) <= set(found) | silent or time.monotonic() > end_s:
                return found
            time.sleep(_POLL_S)

    def _compose(self, verdict: RankError, flights: dict[int, Flight]) -> list[str]:
        return story_of(
            flights, numbers=self.numbers, culprit=verdict.rank, folder=self._folder_of(verdict)
        )

    def _folder_of(self, verdict: RankError) -> Path | None:
        if self._folder is None or verdict.step is None:
            return self._folder
        return self._folder / f"step_{verdict.step:07d}"

    def _write(self, flight: Flight, error: RankError) -> None:
        folder = self._folder_of(error)
        if folder is None:
            return
        try:
            write_flight(folder, flight)
            if self._reporter:
                write_story(folder, error)
        except OSError as problem:  # the failure itself matters more
            error.add_note(f"the flight record could not be written: {problem}")

    def _bounded(self, work: Callable[[], T]) -> T:
        """The result of some talk with the store, which may be dead or out of reach."""
        if self._lost:
            raise StoreLostError("the rendezvous store is lost")
        box: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                box.put((True, work()))
            except (RuntimeError, ValueError) as error:
                box.put((False, error))

        threading.Thread(target=run, name="fullbore-witness", daemon=True).start()
        try:
            well, result = box.get(timeout=_BOUND_S)
        except queue.Empty:
            self._lost = True
            raise StoreLostError("the rendezvous store does not answer") from None
        if not well:
            raise StoreLostError(f"the rendezvous store with it ({_first(str(result))})")
        answer: T = result
        return answer


DIED = "the process died without a word (killed, or out of memory?)"
_CLOSED = "it closed its pipeline (close() was called there), so no step can follow"


def _verdict(flight: Flight, *, rank: int | None, action: str | None, cause: str) -> RankError:
    return RankError(
        rank=rank, action=action, cause=cause, step=flight.step, evaluating=flight.evaluating
    )


def _to_blame(
    suspects: Sequence[int], answers: dict[int, Flight], *, numbers: Sequence[int]
) -> int:
    """Who keeps the suspects from going on, or the first suspect itself.

    At the end of the chain of waits stands a rank that is silent, or waits for nobody; where that
    is not to be seen, some such rank.
    """
    ends = [_end_of_chain(rank, answers) for rank in suspects]
    others = [*ends, *numbers]
    silent = (rank for rank in others if rank not in answers)
    busy = (rank for rank in others if rank in answers and not answers[rank].waits)
    return next(silent, next(busy, suspects[0]))


def _end_of_chain(rank: int, answers: dict[int, Flight]) -> int:
    """Whom the rank waits for in the end."""
    seen = set()
    while rank in answers and rank not in seen:
        seen.add(rank)
        further = answers[rank].waits_for
        if further is None:
            break
        rank = further
    return rank


def _is_late(flight: Flight) -> bool:
    """Whether what went wrong is that a wait took too long, or one before it in the same group."""
    error = (flight.error or "").lower()
    return "timed out" in error or "timeout caused" in error


def _got(answers: dict[int, Flight], rank: int) -> Mapping[int, str]:
    return answers[rank].got if rank in answers else {}


def _since(flight: Flight) -> str:
    return "" if flight.still_s is None else f" there for {flight.still_s:.0f} s"


def _first(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[0]
