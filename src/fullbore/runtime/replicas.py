"""Replicas: the ranks that hold copies of the same stages, and the sum of their gradients.

Each replica trains on rows of its own. Once the last backward of a stage is done, its gradients
leave in buckets, and travel while other stages of the rank and the cool-down of the other ranks go
on; the step's end waits for them. Only what a step has added is reduced: what earlier steps have
left in .grad is set aside and added back, so that steps accumulate exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fullbore.errors import PipelineError
from fullbore.ir import Action, Kind
from fullbore.runtime.control import PeerLostError
from fullbore.runtime.device import Group
from fullbore.runtime.main_grad import gradient_dtype, gradient_of, set_gradient
from fullbore.runtime.sharded import is_sharded

__all__ = ["Earlier", "Edges", "Replicas", "completion_order", "watch_last_backwards"]

_BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel's
_ALIGNED_BYTES = 64
_WAY_BACK = (Kind.B, Kind.I, Kind.W, Kind.SEND_B)

_Operation = Callable[[], Any]
_AnyTensor = TypeVar("_AnyTensor", bound=torch.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edges:
    """Who is told about the end of each stage's way back, by the stage's number.

    before_last: right before the stage's last B, I or W. complete: when its gradients are there
    and the last one that it owes to the stage before is on its way.
    """

    before_last: Callable[[int], None]
    complete: Callable[[int], None]


def completion_order(actions: Sequence[Action]) -> list[int]:
    """The stages of a program in the order in which their ways back end."""
    ends = _last(actions, _WAY_BACK)
    return sorted(ends, key=lambda stage: ends[stage])


def watch_last_backwards(
    actions: Sequence[Action],
    operations: list[_Operation],
    edges: Edges,
) -> None:
    """Put the calls of `edges` around the operations of these actions, one for each action.

    Only the last operations of each stage are replaced; no other one is slower.
    """
    last, end = _last(actions, _WAY_BACK[:3]), _last(actions, _WAY_BACK)
    for stage, index in last.items():
        operations[index] = _in_turn(partial(edges.before_last, stage), operations[index])
    for stage, index in end.items():
        operations[index] = _in_turn(operations[index], partial(edges.complete, stage))


def _last(actions: Sequence[Action], kinds: Sequence[Kind]) -> dict[int, int]:
    """The index of each stage's last action of these kinds."""
    return {action.stage: i for i, action in enumerate(actions) if action.kind in kinds}


def _in_turn(first: _Operation, second: _Operation) -> _Operation:
    def both() -> None:
        first()
        second()

    return both


class Earlier:
    """Gradients of earlier steps, set aside while a step adds its own."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []

    def set_aside(self) -> None:
        """From here on .grad holds what the step adds."""
        held = [(p, gradient_of(p)) for p in self._parameters]
        self._kept = [(p, gradient) for p, gradient in held if gradient is not None]
        for parameter, _ in self._kept:
            set_gradient(parameter, None)

    @torch.no_grad()
    def add_back(self) -> None:
        """Add them to what the step left (also after a failed step)."""
        for parameter, before in self._kept:
            added = gradient_of(parameter)
            set_gradient(parameter, before if added is None else before.add_(added))
        self._kept = []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Parameters whose gradients travel as one tensor. starts: of each in it, in elements."""

    parameters: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    elements: int
    dtype: torch.dtype  # in which they are summed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Travelling:
    """A stage's gradients on their way. flags: how many replicas used each parameter [n]."""

    parameters: Sequence[nn.Parameter]
    flags: torch.Tensor
    sums: list[tuple[_Bucket, torch.Tensor]]
    works: list[dist.Work]


class Replicas:
    """This rank's part in summing gradients over the replicas of its stages.

    group: of the ranks that hold copies of these stages, in the order of replicas. peers: what
    messages call the others. stages: by number; weights that `fully_shard` has split are left to
    it. order: the stages in the order in which their last backwards are done; a weight of several
    stages leaves with the last of them. reduce_dtype: in which gradients are summed, None for
    their own.
    """

    def __init__(
        self,
        *,
        group: Group,
        peers: Sequence[int],
        stages: Mapping[int, nn.Module],
        order: Sequence[int],
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self._group, self._peers, self._stages = group, peers, stages
        self._order, self._dtype = order, reduce_dtype
        self._trained: list[nn.Parameter] = []
        self._buckets: dict[int, list[_Bucket]] = {}
        self._earlier = Earlier([])
        self._travelling: list[_Travelling] = []

    @torch.no_grad()
    def equalize(self) -> None:
        """Give the weights and buffers of all replicas the values of the first one."""
        tensors = [t for m in self._stages.values() for t in (*m.parameters(), *m.buffers())]
        self.spread([list({id(t): t for t in tensors if not is_sharded(t)}.values())])

    @torch.no_grad()
    def spread(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        """Fill each replica's tensors, of which there is a list for each, on all others."""
        travelling: list[tuple[list[torch.Tensor], torch.Tensor, dist.Work]] = []
        for owner, held in enumerate(tensors):
            options = dist.BroadcastOptions()
            options.rootRank = owner
            for same in _by_type(held):
                flat = torch.cat([tensor.detach().flatten() for tensor in same])
                work = self._try(partial(self._group.broadcast, [flat], options))
                travelling.append((same, flat, work))
        for same, flat, work in travelling:
            self._wait(work)
            for tensor, part in zip(
                same, torch.split(flat, [t.numel() for t in same]), strict=True
            ):
                tensor.copy_(part.view(tensor.shape))

    def total(self, value: float, device: torch.device) -> float:
        """The sum of a number over the replicas, the same on all of them."""
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        self._wait(self._sum(tensor))
        return float(tensor)

    def begin(self) -> None:
        """A step begins: what is in .grad is of earlier ones."""
        trained = [p for p in self._plain_weights() if p.requires_grad]
        if [id(p) for p in trained] != [id(p) for p in self._trained]:
            self._trained = trained
            self._buckets = self._plan()
        self._earlier = Earlier(trained)
        self._earlier.set_aside()

    def complete(self, stage: int) -> None:
        """All gradients of a stage are there: let them leave."""
        buckets = self._buckets.get(stage)
        if not buckets:
            return
        parameters = [p for bucket in buckets for p in bucket.parameters]
        flags = torch.tensor(
            [float(gradient_of(p) is not None) for p in parameters], device=parameters[0].device
        )
        works = [self._sum(flags)]
        sums = []
        for bucket in buckets:
            filled = _fill(bucket)
            works.append(self._sum(filled))
            sums.append((bucket, filled))
        self._travelling.append(
            _Travelling(parameters=parameters, flags=flags, sums=sums, works=works)
        )

    def finish(self) -> None:
        """Wait for all sums and put them into .grad; None where no replica used a parameter."""
        for stage in self._travelling:
            for work in stage.works:
                self._wait(work)
            used = iter(stage.flags.tolist())
            for bucket, summed in stage.sums:
                _hand_out(bucket, summed, [next(used) > 0 for _ in bucket.parameters])
        self._travelling = []

    def restore(self) -> None:
        """Add the earlier steps' gradients back (also after a failed step)."""
        self._travelling = []
        self._earlier.add_back()

    # -- buckets -------------------------------------------------------------------------------

    def _plain_weights(self) -> list[nn.Parameter]:
        weights = (p for stage in self._order for p in self._stages[stage].parameters())
        return [p for p in {id(p): p for p in weights}.values() if not is_sharded(p)]

    def _plan(self) -> dict[int, list[_Bucket]]:
        """The buckets of each stage; each weight belongs to the last of its stages."""
        wanted = {id(p) for p in self._trained}
        taken: set[int] = set()
        plan: dict[int, list[_Bucket]] = {}
        for stage in reversed(self._order):
            own = {id(p): p for p in self._stages[stage].parameters() if id(p) in wanted}
            plan[stage] = self._pack([p for key, p in own.items() if key not in taken])
            taken |= own.keys()
        return plan

    def _pack(self, parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(self._dtype or gradient_dtype(parameter), []).append(parameter)
        return [
            _bucket(chosen, dtype)
            for dtype, same in by_dtype.items()
            for chosen in _portions(same, dtype.itemsize)
        ]

    # -- messages ------------------------------------------------------------------------------

    def _sum(self, tensor: torch.Tensor) -> dist.Work:
        return self._try(partial(self._group.allreduce, [tensor]))

    def _try(self, begin: Callable[[], dist.Work]) -> dist.Work:
        try:
            return begin()
        except RuntimeError as error:
            raise PeerLostError(self._peers, str(error)) from error

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(self._peers, str(error)) from error


def _by_type(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Portions of tensors of one type, each of about a bucket's size."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [
        portion for dtype, same in by_dtype.items() for portion in _portions(same, dtype.itemsize)
    ]


def _portions(parameters: Sequence[_AnyTensor], itemsize: int) -> list[list[_AnyTensor]]:
    """The parameters in order, in portions of about a bucket's size."""
    portions: list[list[_AnyTensor]] = []
    filled = _BUCKET_BYTES
    for parameter in parameters:
        size = parameter.numel() * itemsize
        if filled + size > _BUCKET_BYTES:
            portions.append([])
            filled = 0
        portions[-1].append(parameter)
        filled += size
    return portions


def _bucket(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> _Bucket:
    """Each gradient begins at a round address, which fused optimizers like."""
    step = _ALIGNED_BYTES // dtype.itemsize
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.numel() // step) * step
    return _Bucket(parameters=tuple(parameters), starts=tuple(starts), elements=end, dtype=dtype)


@torch.no_grad()
def _fill(bucket: _Bucket) -> torch.Tensor:
    """The bucket's gradients as one tensor, which takes their place; unused ones are zeros."""
    gradients = [gradient_of(parameter) for parameter in bucket.parameters]
    for gradient in gradients:
        if gradient is not None and gradient.layout != torch.strided:
            raise PipelineError(
                f"a weight of shape {list(gradient.shape)} has a gradient of layout "
                f"{gradient.layout}: replicas sum dense gradients, so use sparse=False"
            )
    first, alone = bucket.parameters[0], gradients[0] if len(gradients) == 1 else None
    if alone is not None and alone.dtype == bucket.dtype and alone.is_contiguous():
        set_gradient(first, None)
        return alone
    filled = torch.zeros(bucket.elements, dtype=bucket.dtype, device=first.device)
    parts = _parts(bucket, filled)
    for parameter, gradient, part in zip(bucket.parameters, gradients, parts, strict=True):
        if gradient is not None:
            part.copy_(gradient)
            set_gradient(parameter, None)
    return filled


def _parts(bucket: _Bucket, filled: torch.Tensor) -> list[torch.Tensor]:
    flat = filled.flatten()
    return [
        flat[start : start + p.numel()].view(p.shape)
        for p, start in zip(bucket.parameters, bucket.starts, strict=True)
    ]


def _hand_out(bucket: _Bucket, summed: torch.Tensor, used: Sequence[bool]) -> None:
    parts = _parts(bucket, summed)
    for parameter, part, is_used in zip(bucket.parameters, parts, used, strict=True):
        set_gradient(parameter, part.to(gradient_dtype(parameter)) if is_used else None)
