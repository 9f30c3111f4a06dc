"""What each action of a program does, bound once to a closure.

A closure holds all that its action needs: its stage, its link, the slots that it takes from and
puts into. A rank that has just woken up runs this code cold, so a microsecond of Python here is
several in every action of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError
from fullbore.ir import Action, Kind, Schedule
from fullbore.runtime.batch import Batch, Learnt, MessageKind
from fullbore.runtime.host import Copy, Mark
from fullbore.runtime.layout import Layout, flatten, gradient_layout, unflatten
from fullbore.runtime.links import IncomingLink, Message, OutgoingLink
from fullbore.runtime.owned import OwnedMemory
from fullbore.runtime.recorder import ActivationMeter
from fullbore.runtime.stage import Gradients, StageRunner, guarded, was_changed
from fullbore.verify import LinkUse

__all__ = ["Operation", "Operations", "StepState"]

Operation = Callable[[], Copy | None]


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


@dataclass(slots=True, kw_only=True)
class StepState:
    """What the actions of a step share.

    layouts: by action, of its message, where both ends know it. guards: by action, whether a
    forward must still guard its inputs from changes in place.
    """

    layouts: list[Layout | None]
    guards: list[bool]
    batch: Batch = field(
        default_factory=lambda: Batch(
            inputs=[], targets=[], kwargs=[], signatures=[], train=False, return_outputs=False
        )
    )
    learnt: Learnt = field(default_factory=Learnt)
    meter: ActivationMeter | None = None
    mark: Mark | None = None  # at either end of a copy, where the step is recorded

    def message_kind(self, action: Action) -> MessageKind:
        """What a send or receive carries."""
        forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
        step = {Kind.RECV_F: -1, Kind.RECV_B: 1}.get(action.kind, 0)
        signature = self.batch.signatures[action.microbatch]
        return Kind.F if forward else Kind.B, action.stage + step, signature


class Operations:
    """Binds the actions of one rank's program.

    runners: this rank's stages. outgoing, incoming: links by peer rank. arriving: the use of the
    links to this rank, by peer. overlap: whether sends return at once.
    """

    def __init__(
        self,
        *,
        state: StepState,
        schedule: Schedule,
        runners: Mapping[int, StageRunner],
        outgoing: Mapping[int, OutgoingLink],
        incoming: Mapping[int, IncomingLink],
        arriving: Mapping[int, LinkUse],
        device: torch.device,
        overlap: bool,
    ) -> None:
        self._state, self._schedule, self._runners = state, schedule, runners
        self._outgoing, self._incoming, self._arriving = outgoing, incoming, arriving
        self._device, self._overlap = device, overlap
        self._slots: dict[tuple[Kind, int, int], _Slot] = {}
        self._owned = {stage: OwnedMemory(runner.module) for stage, runner in runners.items()}
        self._arrivals = dict.fromkeys(arriving, 0)  # messages bound so far, by peer

    def begin(self, batch: Batch) -> None:
        """A step begins."""
        self._state.batch = batch
        for owned in self._owned.values():
            owned.begin(batch.inputs, batch.kwargs)

    def reset(self) -> None:
        """Forget everything of a failed step."""
        for slot in self._slots.values():
            slot.value = None

    def bind(self, index: int, action: Action) -> Operation:
        """What carries out an action, the index-th of its program."""
        bind = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.R: self._recompute,
            Kind.OFFLOAD: self._offload,
            Kind.RELOAD: self._reload,
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

    def _forward(self, index: int, action: Action) -> Operation:
        state = self._state
        stage, microbatch = action.stage, action.microbatch
        runner, arrival = self._runners[stage], self._slot(Kind.F, stage, microbatch)
        pass_on = self._pass_on(stage, microbatch)
        guards = state.guards
        # what leaves for the host must not be what the module was given
        always = runner.offloads(microbatch)

        def forward() -> None:
            if stage == 0:
                pass_on(run(state.batch.inputs[microbatch], []))
                return
            layout, leaves = arrival.take()
            if not guards[index] and not always:
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
            batch, meter = state.batch, state.meter
            kwargs, target = batch.kwargs[microbatch], batch.targets[microbatch]
            if meter is None:
                return runner.forward(microbatch, value, leaves, kwargs, target, batch.train)
            recomputes, signature = runner.recomputation is not None, batch.signatures[microbatch]
            with meter.forward(stage, microbatch, signature, runner.kept, recomputes=recomputes):
                return runner.forward(microbatch, value, leaves, kwargs, target, batch.train)

        return forward

    def _pass_on(self, stage: int, microbatch: int) -> Callable[[Any], None]:
        """What becomes of a forward's result."""
        if stage == self._schedule.stages - 1:
            return lambda result: self._keep_result(microbatch, *result)
        if stage + 1 not in self._runners:
            return self._to_send(stage, microbatch)
        arrival = self._slot(Kind.F, stage + 1, microbatch)

        def hand_over(output: Any) -> None:
            layout, tensors = flatten(output)
            # the next stage may change its input in place, so it gets a copy
            copies = [tensor.detach().clone() for tensor in tensors]
            arrival.value = layout, layout.as_leaves(copies)

        return hand_over

    def _to_send(self, stage: int, microbatch: int) -> Callable[[Any], None]:
        slot, owned = self._slot(Kind.SEND_F, stage, microbatch), self._owned[stage]

        def leave(output: Any) -> None:
            slot.value = owned.apart(output)

        return leave

    def _keep_result(self, microbatch: int, output: Any, loss: torch.Tensor | None) -> None:
        state = self._state
        if loss is not None:
            state.batch.losses.keep(microbatch, loss)
        if state.batch.return_outputs:
            state.batch.outputs[microbatch] = _detached(output)

    def _send_forward(self, index: int, action: Action) -> Operation:
        state = self._state
        stage, microbatch = action.stage, action.microbatch
        slot, layouts = self._slot(Kind.SEND_F, stage, microbatch), state.layouts
        link = self._outgoing[self._rank_of(stage + 1)]
        blocking = not self._overlap

        def send() -> None:
            output, known = slot.take(), layouts[index]
            if known is not None and known.is_just(output):
                link.send([output], blocking=blocking)
                return
            layout, tensors = flatten(output)
            if known is None:
                state.learnt.see(state.message_kind(action), layout)
                link.send_described(layout, tensors)
            elif known == layout:
                link.send(tensors, blocking=blocking)
            else:
                raise PipelineError(_other_shape(action, now=layout, before=known))

        return send

    def _receive_forward(self, index: int, action: Action) -> Operation:
        arrival = self._slot(Kind.F, action.stage, action.microbatch)
        take = self._take(index, action, self._rank_of(action.stage - 1))

        def receive() -> None:
            arrival.value = take()

        return receive

    def _take(self, index: int, action: Action, peer: int) -> Callable[[], Message]:
        """Takes the next message from a peer, and lets go of what its arrival proves taken."""
        state = self._state
        layouts, link = state.layouts, self._incoming[peer]
        number = self._arrivals[peer]
        self._arrivals[peer] = number + 1
        returned = int(self._arriving[peer].returned[number])
        let_go = self._outgoing[peer].returned if returned else None

        def take() -> Message:
            message = link.take()
            if layouts[index] is None:
                state.learnt.see(state.message_kind(action), message[0])
            if let_go is not None:
                let_go(returned)
            return message

        return take

    # -- backward ----------------------------------------------------------------------------

    def _backward(self, index: int, action: Action) -> Operation:
        state = self._state
        stage, microbatch = action.stage, action.microbatch
        runner, gradients = self._runners[stage], self._slot(Kind.B, stage, microbatch)
        result = self._passed_back(stage, microbatch)

        def backward() -> None:
            result.value = runner.backward(microbatch, gradients.take())
            if state.meter is not None:
                state.meter.freed(stage, microbatch)

        return backward

    def _backward_input(self, index: int, action: Action) -> Operation:
        state = self._state
        stage, microbatch = action.stage, action.microbatch
        runner, gradients = self._runners[stage], self._slot(Kind.B, stage, microbatch)
        result = self._passed_back(stage, microbatch)

        def backward_input() -> None:
            result.value = runner.backward_input(microbatch, gradients.take())
            if state.meter is not None:
                signature = state.batch.signatures[microbatch]
                state.meter.halved(stage, microbatch, signature, runner.waiting(microbatch))

        return backward_input

    def _backward_weight(self, index: int, action: Action) -> Operation:
        state = self._state
        stage, microbatch = action.stage, action.microbatch
        runner = self._runners[stage]

        def backward_weight() -> None:
            runner.backward_weight(microbatch)
            if state.meter is not None:
                state.meter.freed(stage, microbatch)

        return backward_weight

    def _recompute(self, index: int, action: Action) -> Operation:
        return partial(self._runners[action.stage].recompute, action.microbatch)

    def _offload(self, index: int, action: Action) -> Operation:
        state, runner = self._state, self._runners[action.stage]
        stage, microbatch = action.stage, action.microbatch

        def offload() -> Copy | None:
            left = runner.offload(microbatch, state.mark)
            if state.meter is not None:
                state.meter.left(stage, microbatch, left.bytes)
            return left.copy

        return offload

    def _reload(self, index: int, action: Action) -> Operation:
        state, runner = self._state, self._runners[action.stage]
        stage, microbatch = action.stage, action.microbatch

        def reload() -> Copy | None:
            left = runner.reload(microbatch, state.mark)
            if state.meter is not None:
                state.meter.returned(stage, microbatch, left.bytes)
            return left.copy

        return reload

    def _passed_back(self, stage: int, microbatch: int) -> _Slot:
        """Where the gradients of a stage's inputs go."""
        if stage == 0:
            return _Slot()
        if stage - 1 in self._runners:
            return self._slot(Kind.B, stage - 1, microbatch)
        return self._slot(Kind.SEND_B, stage, microbatch)

    def _send_backward(self, index: int, action: Action) -> Operation:
        state = self._state
        stage, microbatch = action.stage, action.microbatch
        slot, layouts = self._slot(Kind.SEND_B, stage, microbatch), state.layouts
        link = self._outgoing[self._rank_of(stage - 1)]
        blocking = not self._overlap

        def send() -> None:
            gradients, known = slot.take(), layouts[index]
            if known is not None:
                link.send(_with_zeros(gradients, known, self._device), blocking=blocking)
                return
            layout = gradient_layout(gradients)
            state.learnt.see(state.message_kind(action), layout)
            link.send_described(layout, gradients)

        return send

    def _receive_backward(self, index: int, action: Action) -> Operation:
        gradients = self._slot(Kind.B, action.stage, action.microbatch)
        take = self._take(index, action, self._rank_of(action.stage + 1))

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
