"""One life of a pipeline on a rank as others see it: where it is, and how a failure spreads.

Whatever fails in one of a session's phases ends its life on all ranks, with the same words; while
it lasts, a watchdog answers for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fullbore.errors import RankError
from fullbore.ir import Action
from fullbore.runtime.control import PeerLostError, is_of_a_connection
from fullbore.runtime.executor import Executor
from fullbore.runtime.flight import Flight, program_part, source_of
from fullbore.runtime.recorder import SpanLog
from fullbore.runtime.setup import Setup
from fullbore.runtime.watchdog import Watchdog
from fullbore.runtime.wiring import Wiring

__all__ = ["REDUCING", "RUNNING", "TYING", "Life"]

Phase = str
RUNNING: Phase = "the step's actions"
REDUCING: Phase = "summing gradients over the replicas"
TYING: Phase = "summing the gradients of tied weights"
_BETWEEN: Phase = "nothing: it is between two steps"
_SPANS = 16  # in a flight record


class Life:
    """Goes on until something fails, then `failed` is true for good.

    step: the number of the step in hand or to come; evaluating: whether an evaluation is in hand;
    executing: what carries it out, as far as that has begun. tied_ranks: that share tied weights,
    within the pipeline. let_go: forgets what the failed step left behind.
    """

    def __init__(
        self,
        setup: Setup,
        wiring: Wiring,
        *,
        tied_ranks: Sequence[Sequence[int]],
        let_go: Callable[[], None],
    ) -> None:
        self._setup, self._wiring, self._witness = setup, wiring, wiring.witness
        self._tied_ranks, self._let_go = tied_ranks, let_go
        self._numbers, self._number = wiring.control.numbers, setup.rendezvous.number
        self.failed = self.evaluating = False
        self.step = 1
        self.executing: Executor | None = None
        self._phase = _BETWEEN
        self._log: SpanLog | None = None
        self._watchdog = self._watch() if len(setup.rendezvous.everyone) > 1 else None

    def _watch(self) -> Watchdog:
        patience = self._setup.patience
        return Watchdog(
            self,
            self._witness,
            stall_timeout_s=patience.stall_s,
            on_stall=patience.on_stall,
            timeout_s=patience.timeout_s,
        )

    def begin(self, *, train: bool, log: SpanLog | None) -> None:
        """A step or an evaluation begins."""
        self._log, self.executing, self.evaluating = log, None, not train

    def close(self) -> None:
        """It is not watched any more; links and connections go, unless a failure closed them."""
        self._stop_watching()
        if not self.failed:
            self._wiring.close()

    # -- failing -----------------------------------------------------------------------------

    @contextmanager
    def together(self, phase: Phase) -> Iterator[None]:
        """If anything fails inside, every rank fails, with the same RankError.

        KeyboardInterrupt and its like fail the other ranks too, and pass through on this one.
        """
        self._phase = phase
        try:
            yield
        except Exception as error:
            raise self._fail(error, phase) from error
        except BaseException as error:
            self._fail(error, phase)
            raise
        finally:
            self._phase = _BETWEEN

    def _fail(self, error: BaseException, phase: Phase) -> RankError:
        """Say why, or find out why, then close every connection so that all ranks fail."""
        self.failed = True
        flight = replace(self.flight(), error=f"{type(error).__name__}: {error}")
        if self._watchdog is not None:
            flight = replace(flight, still_s=self._watchdog.still_s())
        suspects = self._suspects(error, phase)
        if suspects:
            if isinstance(error, PeerLostError) or phase != RUNNING:
                flight = _waiting_for(suspects, flight)
            verdict = self._witness.explain(flight, suspects=suspects)
        else:
            verdict = self._witness.report(
                flight,
                rank=self._number,
                action=flight.now,
                cause=f"{type(error).__name__}: {error}",
            )
        return self._end(verdict, flight)

    def give_up(self, *, rank: int | None, action: str | None, cause: str) -> RankError:
        """Fail for a reason that every rank knows and gives here."""
        self.failed = True
        flight = self.flight()
        verdict = self._witness.report(flight, rank=rank, action=action, cause=cause)
        return self._end(verdict, flight)

    def _end(self, verdict: RankError, flight: Flight) -> RankError:
        self._wiring.abort()
        told = self._witness.conclude(verdict, flight)
        self._stop_watching()
        self._let_go()
        return told

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def _suspects(self, error: BaseException, phase: Phase) -> Sequence[int]:
        """The ranks of which one must have closed a connection; none if the failure is our own."""
        if isinstance(error, PeerLostError):
            return error.peers
        if not is_of_a_connection(error):
            return []
        here = self._setup.rendezvous.rank
        if phase == TYING:
            members = {r for ranks in self._tied_ranks for r in ranks} - {here}
            return [self._numbers[r] for r in sorted(members)]
        # in a stage that talks to other ranks by itself, as one does that is sharded
        return [r for r in self._setup.rendezvous.everyone if r != self._number]

    # -- being watched -------------------------------------------------------------------------

    def place(self) -> Hashable | None:
        """What changes whenever this rank moves on; None while it is in no call."""
        if self.failed or self._phase == _BETWEEN:
            return None
        at = self.executing.at if self.executing else None
        return self.step, self.evaluating, self._phase, at, self._asked_of()

    def interrupt(self) -> None:
        """Close every connection, so that this rank stops waiting in one of them."""
        if not self.failed:
            self._wiring.abort()

    def _asked_of(self) -> int | None:
        """The rank from which a word is waited for."""
        asked_of = self._wiring.control.waits_for
        return self._wiring.world.waits_for if asked_of is None else asked_of

    def flight(self) -> Flight:
        """What this rank is doing."""
        phase, asked_of = self._phase, self._asked_of()
        told = Flight(
            rank=self._number,
            step=self.step,
            evaluating=self.evaluating,
            phase=phase,
            waits=asked_of is not None or phase in (TYING, REDUCING),
            waits_for=asked_of,
            spans=tuple(self._log.last(_SPANS)) if self._log is not None else (),
        )
        executor = self.executing
        if executor is None or not executor.actions:
            return told
        at = executor.at if phase == RUNNING else len(executor.actions)
        told = self._with_program(told, executor, at)
        if phase != RUNNING or asked_of is not None:
            return told
        return self._with_action(told, executor.actions[at])

    def _with_program(self, told: Flight, executor: Executor, at: int) -> Flight:
        schedule = self._setup.programs[not told.evaluating]
        part = program_part(schedule, executor.actions, at)
        got = {self._numbers[peer]: action for peer, action in part.got.items()}
        return replace(told, done=part.done, coming=part.coming, got=got)

    def _with_action(self, told: Flight, action: Action) -> Flight:
        told = replace(told, action=str(action))
        source = source_of(self._setup.schedule, action)
        if source is None:
            return told
        peer = self._numbers[source.rank]
        return replace(told, waits=True, waits_for=peer, owed=str(source.action))


def _waiting_for(suspects: Sequence[int], flight: Flight) -> Flight:
    """The flight of a rank that found one of these lost, which may be while it had to do with
    another: receives are posted ahead.
    """
    if flight.waits_for in suspects:
        return replace(flight, waits=True)
    alone = suspects[0] if len(suspects) == 1 else None
    return replace(flight, waits=True, waits_for=alone, owed=None)
