"""The executor: carries out one rank's program, action by action.

It knows nothing of any particular schedule: a program with sends and receives in place says
everything. Each action is bound once, before the first step, to a closure that holds all that it
needs: its stage, its link, the slots that it takes from and puts into. A rank that has just woken
up runs this code cold, so a microsecond of Python here is several in every action of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError
from fullbore.ir import COMMUNICATION_KINDS, Action, Kind, Schedule
from fullbore.runtime.batch import Batch, Learnt, MessageKind
from fullbore.runtime.layout import Layout, flatten, gradient_layout, unflatten
from fullbore.runtime.links import IncomingLink, OutgoingLink
from fullbore.runtime.recorder import ActivationMeter, SpanLog
from fullbore.runtime.stage import Gradients, StageRunner, guarded, was_changed
from fullbore.verify import LinkUse, window

__all__ = ["Executor"]

_Operation = Callable[[], None]


@dataclass(slots=True)
class _Slot:
    """Where one value waits on this rank between two actions; empty between two steps.

    For a forward: the layout and the leaves that have arrived; for a backward: the gradients of
    the stage's outputs; for a send: what the stage gave.
    """

    value: Any = None

    def take(self) -> Any:
        """The value, which leaves the slot."""
        value, self.value = self.value, None
        return value


class Executor:
    """Runs the program of one rank; made once for a schedule.

    schedule: with sends and receives in place. outgoing, incoming: links by peer rank. uses: what
    the schedule asks of this rank's links. overlap: whether sends return at once.
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
    ) -> None:
        self._schedule, self._runners = schedule, runners
        self._outgoing, self._incoming = outgoing, incoming
        self._uses_out = {use.destination: use for use in uses if use.source == rank}
        self._taken = {peer: use.taken.tolist() for peer, use in self._uses_out.items()}
        self._uses_in = {use.source: use for use in uses if use.destination == rank}
        self._device, self._overlap = device, overlap
        self.actions = tuple(schedule.programs[rank])
        self._first_message = next(
            (i for i, a in enumerate(self.actions) if a.kind in COMMUNICATION_KINDS),
            len(self.actions),
        )
        self._batch = Batch(
            inputs=[], targets=[], kwargs=[], signatures=[], train=False, return_outputs=False
        )
        self._learnt = Learnt()
        self._prepared_for: object = None
        self._meter: ActivationMeter | None = None
        self.at = 0  # index of the action in hand
        # by action: the layout of its message, where both ends know it; and whether a forward
        # must still guard its inputs from changes in place
        self._layouts: list[Layout | None] = [None] * len(self.actions)
        self._guards = [True] * len(self.actions)
        self._expected: dict[int, list[Layout | None]] = {}
        self._slots: dict[tuple[Kind, int, int], _Slot] = {}
        self._operations = [self._bind(i, action) for i, action in enumerate(self.actions)]

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
        self._batch, self._meter, self.at = batch, meter, 0
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
                self._operations[index]()
                log.end(span)

        return carry_out

    def finish(self) -> None:
        """The step is over on every rank: let go of what was sent."""
        for peer in self._uses_out:
            self._outgoing[peer].finish()

    def reset(self) -> None:
        """Forget everything of a failed step."""
        for slot in self._slots.values():
            slot.value = None
        for runner in self._runners.values():
            runner.reset()

    def source_of(self, action: Action) -> tuple[int, Action] | None:
        """Which rank owes a receive its message, and by which compute; None for other actions."""
        match action.kind:
            case Kind.RECV_F:
                stage, kind = action.stage - 1, Kind.F
            case Kind.RECV_B:
                stage, kind = action.stage + 1, Kind.B
            case _:
                return None
        owed = Action(stage=stage, kind=kind, microbatch=action.microbatch)
        return self._rank_of(stage), owed

    # -- before a step's first message -------------------------------------------------------

    def _prepare(self, learnt: Learnt) -> None:
        """Look up what is known of the step's messages, and tell each link what will come."""
        now = (learnt, len(learnt.known), tuple(self._batch.signatures))
        if now != self._prepared_for:
            self._learnt, self._prepared_for = learnt, now
            self._look_up()
        ranks = self._schedule.ranks
        for peer, use in self._uses_out.items():
            self._outgoing[peer].expect(self._taken[peer], window=window(use, ranks=ranks))
        for peer, use in self._uses_in.items():
            self._incoming[peer].expect(self._expected[peer], window=window(use, ranks=ranks))

    def _look_up(self) -> None:
        self._expected = {peer: [] for peer in self._uses_in}
        for index, action in enumerate(self.actions):
            self._guards[index] = True
            if action.kind in COMMUNICATION_KINDS:
                layout = self._learnt.known.get(self._message_kind(action))
                self._layouts[index] = layout
                source = self.source_of(action)
                if source is not None:
                    self._expected[source[0]].append(layout)

    def _message_kind(self, action: Action) -> MessageKind:
        """What a send or receive carries."""
        forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        step = {Kind.RECV_F: -1, Kind.RECV_B: 1}.get(action.kind, 0)
        signature = self._batch.signatures[action.microbatch]
        return Kind.F if forward else Kind.B, action.stage + step, signature

    # -- binding -----------------------------------------------------------------------------

    def _bind(self, index: int, action: Action) -> _Operation:
        bind = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
        }[action.kind]
        return bind(index, action)

    def _slot(self, consumer: Kind, stage: int, microbatch: int) -> _Slot:
        """The slot from which (stage, microbatch)'s action of a kind takes; Kind.B is for I too."""
        return self._slots.setdefault((consumer, stage, microbatch), _Slot())

    def _rank_of(self, stage: int) -> int:
        return self._schedule.placement.stage_to_rank[stage]

    # -- forward -----------------------------------------------------------------------------

    def _forward(self, index: int, action: Action) -> _Operation:
        stage, microbatch = action.stage, action.microbatch
        runner, arrival = self._runners[stage], self._slot(Kind.F, stage, microbatch)
        pass_on = self._pass_on(stage, microbatch)
        guards = self._guards

        def forward() -> None:
            if stage == 0:
                pass_on(run(self._batch.inputs[microbatch], []))
                return
            layout, leaves = arrival.take()
            if not guards[index]:
                with_no_guard(layout, leaves)
                return
            given = guarded(leaves)
            pass_on(run(unflatten(layout, given), leaves))
            guards[index] = was_changed(given)

        def with_no_guard(layout: Layout, leaves: Sequence[torch.Tensor]) -> None:
            try:
                pass_on(run(unflatten(layout, leaves), leaves))
            except RuntimeError as error:
                if "leaf Variable that requires grad" not in str(error):
                    raise
                raise PipelineError(_changed_after_all(action)) from error

        def run(value: Any, leaves: Sequence[torch.Tensor]) -> Any:
            batch, meter = self._batch, self._meter
            kwargs, target = batch.kwargs[microbatch], batch.targets[microbatch]
            if meter is None:
                return runner.forward(microbatch, value, leaves, kwargs, target, batch.train)
            with meter.forward(stage, microbatch):
                return runner.forward(microbatch, value, leaves, kwargs, target, batch.train)

        return forward

    def _pass_on(self, stage: int, microbatch: int) -> Callable[[Any], None]:
        """What becomes of a forward's result."""
        if stage == self._schedule.stages - 1:
            return lambda result: self._keep_result(microbatch, *result)
        if stage + 1 not in self._runners:
            to_send = self._slot(Kind.SEND_F, stage, microbatch)
            return lambda output: setattr(to_send, "value", output)
        arrival = self._slot(Kind.F, stage + 1, microbatch)

        def hand_over(output: Any) -> None:
            layout, tensors = flatten(output)
            # the next stage may change its input in place, so it gets a copy
            copies = [tensor.detach().clone() for tensor in tensors]
            arrival.value = layout, layout.as_leaves(copies)

        return hand_over

    def _keep_result(self, microbatch: int, output: Any, loss: torch.Tensor | None) -> None:
        if loss is not None:
            self._batch.losses[microbatch] = loss
        if self._batch.return_outputs:
            self._batch.outputs[microbatch] = _detached(output)

    def _send_forward(self, index: int, action: Action) -> _Operation:
        stage, microbatch = action.stage, action.microbatch
        slot, layouts = self._slot(Kind.SEND_F, stage, microbatch), self._layouts
        link = self._outgoing[self._rank_of(stage + 1)]
        blocking = not self._overlap

        def send() -> None:
            output, known = slot.take(), layouts[index]
            if known is not None and known.is_just(output):
                link.send([output], blocking=blocking)
                return
            layout, tensors = flatten(output)
            if known is None:
                self._learnt.see(self._message_kind(action), layout)
                link.send_described(layout, tensors)
            elif known == layout:
                link.send(tensors, blocking=blocking)
            else:
                raise PipelineError(_other_shape(action, now=layout, before=known))

        return send

    def _receive_forward(self, index: int, action: Action) -> _Operation:
        arrival = self._slot(Kind.F, action.stage, action.microbatch)
        take = self._take(index, action, self._incoming[self._rank_of(action.stage - 1)])

        def receive() -> None:
            arrival.value = take()

        return receive

    def _take(
        self, index: int, action: Action, link: IncomingLink
    ) -> Callable[[], tuple[Layout, list[torch.Tensor]]]:
        layouts = self._layouts

        def take() -> Any:
            message = link.take()
            if layouts[index] is None:
                self._learnt.see(self._message_kind(action), message[0])
            return message

        return take

    # -- backward ----------------------------------------------------------------------------

    def _backward(self, index: int, action: Action) -> _Operation:
        stage, microbatch = action.stage, action.microbatch
        runner, gradients = self._runners[stage], self._slot(Kind.B, stage, microbatch)
        result = self._passed_back(stage, microbatch)

        def backward() -> None:
            result.value = runner.backward(microbatch, gradients.take())
            if self._meter is not None:
                self._meter.freed(stage, microbatch)

        return backward

    def _backward_input(self, index: int, action: Action) -> _Operation:
        stage, microbatch = action.stage, action.microbatch
        runner, gradients = self._runners[stage], self._slot(Kind.B, stage, microbatch)
        result = self._passed_back(stage, microbatch)

        def backward_input() -> None:
            result.value = runner.backward_input(microbatch, gradients.take())

        return backward_input

    def _backward_weight(self, index: int, action: Action) -> _Operation:
        stage, microbatch = action.stage, action.microbatch
        runner = self._runners[stage]

        def backward_weight() -> None:
            runner.backward_weight(microbatch)
            if self._meter is not None:
                self._meter.freed(stage, microbatch)

        return backward_weight

    def _passed_back(self, stage: int, microbatch: int) -> _Slot:
        """Where the gradients of a stage's inputs go."""
        if stage == 0:
            return _Slot()
        if stage - 1 in self._runners:
            return self._slot(Kind.B, stage - 1, microbatch)
        return self._slot(Kind.SEND_B, stage, microbatch)

    def _send_backward(self, index: int, action: Action) -> _Operation:
        stage, microbatch = action.stage, action.microbatch
        slot, layouts = self._slot(Kind.SEND_B, stage, microbatch), self._layouts
        link = self._outgoing[self._rank_of(stage - 1)]
        blocking = not self._overlap

        def send() -> None:
            gradients, known = slot.take(), layouts[index]
            if known is not None:
                link.send(_with_zeros(gradients, known, self._device), blocking=blocking)
                return
            layout = gradient_layout(gradients)
            self._learnt.see(self._message_kind(action), layout)
            link.send_described(layout, gradients)

        return send

    def _receive_backward(self, index: int, action: Action) -> _Operation:
        gradients = self._slot(Kind.B, action.stage, action.microbatch)
        take = self._take(index, action, self._incoming[self._rank_of(action.stage + 1)])

        def receive() -> None:
            gradients.value = take()[1]

        return receive


def _other_shape(action: Action, *, now: Layout, before: Layout) -> str:
    return (
        f"the output of stage {action.stage} for microbatch {action.microbatch} is ({now}), but "
        f"was ({before}) before for inputs of the same shapes: for outputs that change by "
        "themselves make the pipeline with static_shapes=False"
    )


def _changed_after_all(action: Action) -> str:
    return (
        f"stage {action.stage} changes its input in place for microbatch {action.microbatch}, "
        "though it did not in the steps before: step again, inputs are guarded from now on; or "
        "let the stage work on a copy"
    )


def _with_zeros(
    gradients: Gradients, known: Layout, device: torch.device
) -> list[torch.Tensor | None]:
    """The receiver waits for every gradient that it knows of: an unused one is sent as zeros."""
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=device) if g is None and t is not None else g
        for g, t in zip(gradients, known.tensors, strict=True)
    ]


def _detached(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value
    )
