"""The executor: carries out one rank's program, action by action.

It knows nothing of any particular schedule: a program with sends and receives in place says
everything, and each action is bound to what carries it out before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from fullbore.ir import COMMUNICATION_KINDS, Schedule
from fullbore.runtime.batch import Batch, Learnt
from fullbore.runtime.flight import source_of
from fullbore.runtime.layout import Layout
from fullbore.runtime.links import IncomingLink, OutgoingLink
from fullbore.runtime.operations import Operations, StepState
from fullbore.runtime.recorder import ActivationMeter, SpanLog
from fullbore.runtime.replicas import Edges, watch_last_backwards
from fullbore.runtime.stage import StageRunner
from fullbore.verify import LinkUse, window

__all__ = ["Executor"]


class Executor:
    """Runs the program of one rank; made once for a schedule.

    schedule: with sends and receives in place. outgoing, incoming: links by peer rank. uses: what
    the schedule asks of this rank's links. overlap: whether sends return at once. edges: what is
    to be told about the ends of the stages' ways back.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        rank: int,
        runners: Mapping[int, StageRunner],
        outgoing: Mapping[int, OutgoingLink],
        incoming: Mapping[int, IncomingLink],
        uses: Sequence[LinkUse],
        device: torch.device,
        overlap: bool,
        edges: Edges | None = None,
    ) -> None:
        self._schedule, self._runners = schedule, runners
        self._outgoing, self._incoming = outgoing, incoming
        self._uses_out = {use.destination: use for use in uses if use.source == rank}
        self._taken = {peer: use.taken.tolist() for peer, use in self._uses_out.items()}
        self._uses_in = {use.source: use for use in uses if use.destination == rank}
        self.actions = tuple(schedule.programs[rank])
        self._first_message = next(
            (i for i, a in enumerate(self.actions) if a.kind in COMMUNICATION_KINDS),
            len(self.actions),
        )
        self._state = StepState(
            layouts=[None] * len(self.actions), guards=[True] * len(self.actions)
        )
        self._bound = Operations(
            state=self._state,
            schedule=schedule,
            runners=runners,
            outgoing=outgoing,
            incoming=incoming,
            arriving=self._uses_in,
            device=device,
            overlap=overlap,
        )
        self._operations = [self._bound.bind(i, action) for i, action in enumerate(self.actions)]
        if edges is not None:
            watch_last_backwards(self.actions, self._operations, edges)
        self._expected: dict[int, list[Layout | None]] = {}
        self._prepared_for: object = None
        self.at = 0  # index of the action in hand

    def run(
        self,
        batch: Batch,
        agree: Callable[[], Learnt],
        *,
        log: SpanLog | None = None,
        meter: ActivationMeter | None = None,
    ) -> None:
        """Carry out the program on a batch; fills batch.losses and batch.outputs.

        agree: waits for what all ranks know of the step's messages, and gives it; called before
        this rank's first message.
        """
        self._bound.begin(batch)
        self._state.meter, self.at = meter, 0
        self._state.mark = None if log is None else log.mark
        for stage, runner in self._runners.items():
            if runner.recomputation is not None:
                told = None if meter is None else partial(meter.restored, stage)
                runner.recomputation.restored = told
        carry_out = self._carry_out if log is None else self._carry_out_recorded(log)
        carry_out(0, self._first_message)
        self.at = min(self._first_message, len(self.actions) - 1)
        self._prepare(agree())
        carry_out(self._first_message, len(self.actions))

    def _carry_out(self, start: int, stop: int) -> None:
        operations = self._operations
        for index in range(start, stop):
            self.at = index
            operations[index]()

    def _carry_out_recorded(self, log: SpanLog) -> Callable[[int, int], None]:
        def carry_out(start: int, stop: int) -> None:
            for index in range(start, stop):
                self.at = index
                span = log.begin(self.actions[index])
                log.end(span, self._operations[index]())

        return carry_out

    def finish(self) -> None:
        """The step is over on every rank: let go of what was sent."""
        for peer in self._uses_out:
            self._outgoing[peer].finish()

    def reset(self) -> None:
        """Forget everything of a failed step."""
        self._bound.reset()
        for runner in self._runners.values():
            runner.reset()

    # -- before a step's first message -------------------------------------------------------

    def _prepare(self, learnt: Learnt) -> None:
        """Look up what is known of the step's messages, and tell each link what will come."""
        now = (learnt, len(learnt.known), tuple(self._state.batch.signatures))
        if now != self._prepared_for:
            self._state.learnt, self._prepared_for = learnt, now
            self._look_up()
        ranks = self._schedule.ranks
        for peer, use in self._uses_out.items():
            self._outgoing[peer].expect(self._taken[peer], window=window(use, ranks=ranks))
        for peer, use in self._uses_in.items():
            self._incoming[peer].expect(self._expected[peer], window=window(use, ranks=ranks))

    def _look_up(self) -> None:
        state = self._state
        self._expected = {peer: [] for peer in self._uses_in}
        for index, action in enumerate(self.actions):
            state.guards[index] = True
            if action.kind in COMMUNICATION_KINDS:
                layout = state.learnt.known.get(state.message_kind(action))
                state.layouts[index] = layout
                source = source_of(self._schedule, action)
                if source is not None:
                    self._expected[source.rank].append(layout)
