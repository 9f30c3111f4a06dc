"""The executor: carries out one rank's program, action by action.

It knows nothing of any particular schedule: a program with sends and receives in place says
everything, and each action is bound to what carries it out before the first step. Values travel
between actions through a mailbox, which a step starts and leaves empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError
from fullbore.ir import COMMUNICATION_KINDS, Action, Kind, Schedule
from fullbore.runtime.layout import Layout, flatten, gradient_layout, unflatten
from fullbore.runtime.links import IncomingLink, OutgoingLink
from fullbore.runtime.owned import OwnedMemory
from fullbore.runtime.recorder import ActivationMeter, SpanLog
from fullbore.runtime.stage import Gradients, StageRunner, as_leaves, enter
from fullbore.verify import LinkUse, window

__all__ = ["Batch", "Executor", "Learnt", "MessageKind"]

_Key = tuple[int, int]  # stage, microbatch
MessageKind = tuple[Kind, int, int]  # F or B, stage that sends it, number of the input's signature


@dataclass(slots=True, kw_only=True)
class Batch:
    """What a step works on: one entry a microbatch in each list."""

    inputs: list[Any]  # where the first stage is, else Nones
    targets: list[Any]  # where the last stage is, else Nones
    kwargs: list[dict[str, Any]]
    signatures: list[int]  # which shapes the inputs have, as numbered by the first stage's rank
    train: bool
    return_outputs: bool
    rows: int | None = None  # of the tensors that were split, where that is known
    losses: dict[int, torch.Tensor] = field(default_factory=dict)  # filled where the last stage is
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Learnt:
    """Layouts of messages: those that both ends know, and those seen in the current step."""

    known: dict[MessageKind, Layout] = field(default_factory=dict)
    seen: dict[MessageKind, Layout] = field(default_factory=dict)

    def see(self, kind: MessageKind, layout: Layout) -> None:
        """Both ends of a link see a new kind of message in the same step."""
        before = self.seen.setdefault(kind, layout)
        if before != layout or not layout.fixed:
            self.seen[kind] = Layout(tensors=layout.tensors, structure=b"", fixed=False)

    def commit(self) -> None:
        """The step went well everywhere: what was seen is known at both ends from now on."""
        self.known.update((kind, layout) for kind, layout in self.seen.items() if layout.fixed)
        self.seen.clear()


@dataclass(slots=True, kw_only=True)
class _Mailbox:
    """What waits on this rank between two actions."""

    arrived: dict[_Key, tuple[Any, list[torch.Tensor]]] = field(default_factory=dict)
    gradients: dict[_Key, Gradients] = field(default_factory=dict)
    outputs: dict[_Key, tuple[Layout, list[torch.Tensor]]] = field(default_factory=dict)
    input_gradients: dict[_Key, Gradients] = field(default_factory=dict)


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
        self._uses_in = {use.source: use for use in uses if use.destination == rank}
        self._owned = {stage: OwnedMemory(runner.module) for stage, runner in runners.items()}
        self._device, self._overlap = device, overlap
        self.actions = tuple(schedule.programs[rank])
        self._operations = [self._bind(action) for action in self.actions]
        self._first_message = next(
            (i for i, a in enumerate(self.actions) if a.kind in COMMUNICATION_KINDS),
            len(self.actions),
        )
        self._mail = _Mailbox()
        self._batch = Batch(
            inputs=[], targets=[], kwargs=[], signatures=[], train=False, return_outputs=False
        )
        self._learnt = Learnt()
        self._meter: ActivationMeter | None = None
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
        self._batch, self._meter, self.at = batch, meter, 0
        for owned in self._owned.values():
            owned.begin(batch.inputs, batch.kwargs)
        carry_out = self._carry_out if log is None else partial(self._carry_out_recorded, log)
        carry_out(0, self._first_message)
        self.at = min(self._first_message, len(self.actions) - 1)
        self._learnt = agree()
        self._expect()
        carry_out(self._first_message, len(self.actions))

    def _carry_out(self, start: int, stop: int) -> None:
        for index in range(start, stop):
            self.at = index
            self._operations[index]()

    def _carry_out_recorded(self, log: SpanLog, start: int, stop: int) -> None:
        for index in range(start, stop):
            self.at = index
            span = log.begin(self.actions[index])
            self._operations[index]()
            log.end(span)

    def finish(self) -> None:
        """The step is over on every rank: let go of what was sent."""
        for peer in self._uses_out:
            self._outgoing[peer].finish()

    def reset(self) -> None:
        """Forget everything of a failed step."""
        self._mail = _Mailbox()
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
        return self._schedule.placement.stage_to_rank[stage], owed

    # -- binding -----------------------------------------------------------------------------

    def _bind(self, action: Action) -> _Operation:
        stage, microbatch = action.stage, action.microbatch
        operation = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
        }[action.kind]
        return partial(operation, stage, microbatch)

    def _rank_of(self, stage: int) -> int:
        return self._schedule.placement.stage_to_rank[stage]

    def _is_local(self, stage: int) -> bool:
        return stage in self._runners

    def _is_last(self, stage: int) -> bool:
        return stage == self._schedule.stages - 1

    def _expect(self) -> None:
        """Tell each link what the step will bring, in order."""
        ranks = self._schedule.ranks
        for peer, use in self._uses_out.items():
            self._outgoing[peer].expect(use.taken.tolist(), window=window(use, ranks=ranks))
        expected: dict[int, list[Layout | None]] = {peer: [] for peer in self._uses_in}
        for action in self.actions:
            source = self.source_of(action)
            if source is not None:
                peer, owed = source
                expected[peer].append(self._learnt.known.get(self._message_kind(owed)))
        for peer, use in self._uses_in.items():
            self._incoming[peer].expect(expected[peer], window=window(use, ranks=ranks))

    def _message_kind(self, produced_by: Action) -> MessageKind:
        kind = Kind.F if produced_by.kind == Kind.F else Kind.B
        return kind, produced_by.stage, self._batch.signatures[produced_by.microbatch]

    # -- forward -----------------------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int) -> None:
        batch, key = self._batch, (stage, microbatch)
        leaves: list[torch.Tensor] = []
        if stage == 0:
            value = batch.inputs[microbatch]
        else:
            value, leaves = self._mail.arrived.pop(key)
        forward = partial(
            self._runners[stage].forward,
            microbatch,
            value,
            leaves,
            kwargs=batch.kwargs[microbatch],
            target=batch.targets[microbatch],
            train=batch.train,
        )
        del value
        if self._meter is None:
            result = forward()
        else:
            with self._meter.forward(stage, microbatch):
                result = forward()
        if self._is_last(stage):
            self._keep_result(microbatch, *result)
        else:
            self._pass_on(key, result)

    def _keep_result(self, microbatch: int, output: Any, loss: torch.Tensor | None) -> None:
        if loss is not None:
            self._batch.losses[microbatch] = loss.detach()
        if self._batch.return_outputs:
            self._batch.outputs[microbatch] = _detached(output)

    def _pass_on(self, key: _Key, output: Any) -> None:
        stage, microbatch = key
        layout, tensors = flatten(output)
        if not self._is_local(stage + 1):
            self._mail.outputs[key] = layout, self._owned[stage].apart(tensors)
            return
        # the next stage may change its input in place, so it gets a copy
        copies: list[torch.Tensor | None] = [tensor.detach().clone() for tensor in tensors]
        self._arrive((stage + 1, microbatch), layout, copies)

    def _arrive(self, key: _Key, layout: Layout, tensors: list[torch.Tensor | None]) -> None:
        leaves = as_leaves(layout, tensors)
        self._mail.arrived[key] = unflatten(layout, enter(leaves)), leaves

    def _send_forward(self, stage: int, microbatch: int) -> None:
        layout, tensors = self._mail.outputs.pop((stage, microbatch))
        kind: MessageKind = (Kind.F, stage, self._batch.signatures[microbatch])
        known = self._learnt.known.get(kind)
        if known is None:
            self._learnt.see(kind, layout)
        elif known != layout:
            raise PipelineError(
                f"the output of stage {stage} for microbatch {microbatch} is ({layout}), but was "
                f"({known}) before for inputs of the same shapes: for outputs that change by "
                "themselves make the pipeline with static_shapes=False"
            )
        self._send(stage + 1, tensors, None if known else layout)

    def _send(
        self,
        to_stage: int,
        tensors: Sequence[torch.Tensor | None],
        described_by: Layout | None,
    ) -> None:
        # nothing is posted for a message that describes itself: to wait for it could be a deadlock
        blocking = not self._overlap and described_by is None
        self._outgoing[self._rank_of(to_stage)].send(
            tensors, described_by=described_by, blocking=blocking
        )

    def _receive_forward(self, stage: int, microbatch: int) -> None:
        kind: MessageKind = (Kind.F, stage - 1, self._batch.signatures[microbatch])
        layout, tensors = self._incoming[self._rank_of(stage - 1)].take()
        if kind not in self._learnt.known:
            self._learnt.see(kind, layout)
        self._arrive((stage, microbatch), layout, tensors)

    # -- backward ----------------------------------------------------------------------------

    def _backward(self, stage: int, microbatch: int) -> None:
        gradients = self._gradients_for(stage, microbatch)
        result = self._runners[stage].backward(microbatch, gradients)
        self._freed(stage, microbatch)
        self._pass_back(stage, microbatch, result)

    def _backward_input(self, stage: int, microbatch: int) -> None:
        gradients = self._gradients_for(stage, microbatch)
        result = self._runners[stage].backward_input(microbatch, gradients)
        self._pass_back(stage, microbatch, result)

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        self._runners[stage].backward_weight(microbatch)
        self._freed(stage, microbatch)

    def _gradients_for(self, stage: int, microbatch: int) -> Gradients | None:
        return None if self._is_last(stage) else self._mail.gradients.pop((stage, microbatch))

    def _freed(self, stage: int, microbatch: int) -> None:
        if self._meter is not None:
            self._meter.freed(stage, microbatch)

    def _pass_back(self, stage: int, microbatch: int, gradients: Gradients) -> None:
        if stage == 0:
            return
        if self._is_local(stage - 1):
            self._mail.gradients[stage - 1, microbatch] = gradients
        else:
            self._mail.input_gradients[stage, microbatch] = gradients

    def _send_backward(self, stage: int, microbatch: int) -> None:
        gradients = self._mail.input_gradients.pop((stage, microbatch))
        kind: MessageKind = (Kind.B, stage, self._batch.signatures[microbatch])
        known = self._learnt.known.get(kind)
        layout = None
        if known is None:
            layout = gradient_layout(gradients)
            self._learnt.see(kind, layout)
        else:
            gradients = _with_zeros(gradients, known, self._device)
        self._send(stage - 1, gradients, layout)

    def _receive_backward(self, stage: int, microbatch: int) -> None:
        kind: MessageKind = (Kind.B, stage + 1, self._batch.signatures[microbatch])
        layout, tensors = self._incoming[self._rank_of(stage + 1)].take()
        if kind not in self._learnt.known:
            self._learnt.see(kind, layout)
        self._mail.gradients[stage, microbatch] = tensors


_Operation = Callable[[], None]


def _with_zeros(gradients: Gradients, known: Layout, device: torch.device) -> Gradients:
    """The receiver waits for every gradient that it knows of: an unused one is sent as zeros."""
    return [
        torch.zeros(t.shape, dtype=t.dtype, device=device) if g is None and t is not None else g
        for g, t in zip(gradients, known.tensors, strict=True)
    ]


def _detached(value: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, value
    )
