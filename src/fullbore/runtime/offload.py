"""Offloading: what a forward saves for its backward leaves for the host, and comes back in time.

While the forward of a microbatch runs whose program has an `OFFLOAD`, the graph is given handles
instead of the tensors that it saves. OFFLOAD copies the storages behind them to the host and lets
go of them, each once however many saved tensors lie in it. RELOAD copies them into new storages,
and the backward finds its tensors there as they were: same shape, strides and bytes.

What lies in the memory of parameters, buffers and other tensors of the rank's modules, or of the
step's inputs and targets, stays: it would be there anyway. So does what is no plain tensor of the
stage's device. What a module keeps for its backward by itself, past autograd, is not seen.

Autograd does not look after changes in place where hooks stand in for saved tensors, so the
handles do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError
from fullbore.ir import Kind, Schedule
from fullbore.runtime.batch import Batch
from fullbore.runtime.file_host import FileHost
from fullbore.runtime.host import Copy, Host, Mark
from fullbore.runtime.owned import storages_of, tensors_of
from fullbore.runtime.pinned_host import PinnedHost

__all__ = ["Left", "Offload", "Offloading", "host_of"]

_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class _Saved:
    """Stands in the graph for a saved tensor.

    tensor: shares its count of changes for good, and its memory until that leaves. version: that
    count when it was saved. storage: where it lies since it has come back.
    """

    tensor: torch.Tensor
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_here: bool = True
    storage: torch.UntypedStorage | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> _Saved:
        """Without its graph, which leads back to here."""
        is_plain = type(tensor) in _PLAIN and tensor.layout == torch.strided
        return _Saved(
            tensor=tensor.detach(),
            version=tensor._version,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride() if is_plain else (),
            offset=int(tensor.storage_offset()) if is_plain else 0,
        )

    def check(self) -> None:
        """Raise PipelineError where it has changed since it was saved, as autograd would."""
        if self.tensor._version != self.version:
            raise PipelineError(
                f"a tensor of shape {list(self.size)} that the backward needs has been changed in "
                f"place since it was saved (version {self.tensor._version}, expected "
                f"{self.version}): change a copy"
            )

    def let_go(self) -> None:
        """Of the memory: it leaves."""
        self.is_here = False
        self.tensor.data = torch.empty(0, dtype=self.dtype, device=self.tensor.device)

    def take(self) -> torch.Tensor:
        """The tensor, for the backward."""
        self.check()
        if self.is_here:
            return self.tensor
        assert self.storage is not None, "its RELOAD comes before the backward"
        empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return empty.set_(self.storage, self.offset, self.size, self.stride)


def _take(saved: _Saved) -> torch.Tensor:
    return saved.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What an OFFLOAD did: how many bytes leave, and the copy, if there are any."""

    bytes: int
    copy: Copy | None


@dataclass(slots=True, kw_only=True)
class _Gone:
    """One microbatch on the host: by storage, the handles of the tensors in it."""

    away: Any
    bytes: int
    handles: list[list[weakref.ref[_Saved]]]
    back: Copy | None = None


@dataclass(slots=True, kw_only=True)
class _Staying:
    """The addresses of storages that stay, for the step in hand."""

    places: set[int] = field(default_factory=set)


class Offload:
    """What of one stage leaves. microbatches: those with an OFFLOAD; no other one is touched."""

    def __init__(self, microbatches: Iterable[int], host: Host[Any], staying: _Staying) -> None:
        self.microbatches = frozenset(microbatches)
        self._host, self._staying = host, staying
        self._here: dict[int, list[weakref.ref[_Saved]]] = {}
        self._gone: dict[int, _Gone] = {}

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around the forward of a microbatch."""
        if microbatch not in self.microbatches:
            yield
            return
        handles = self._here[microbatch] = []
        with saved_tensors_hooks(partial(_keep, handles), _take):
            yield

    def kept(self, microbatch: int) -> Iterator[torch.Tensor]:
        """What a forward has saved, before its OFFLOAD."""
        return (saved.tensor for saved in _alive(self._here.get(microbatch, ())))

    def leave(self, microbatch: int, leaves: Sequence[torch.Tensor], mark: Mark | None) -> Left:
        """OFFLOAD; leaves: the stage's inputs as they arrived, of which nothing but the gradient
        is needed any more. Raises PipelineError where anything was changed in place.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        handles: dict[int, list[weakref.ref[_Saved]]] = {}
        for saved in _alive(self._here.pop(microbatch)):
            storage = self._leaving(saved)
            if storage is not None:
                saved.check()
                storages[storage.data_ptr()] = storage
                handles.setdefault(storage.data_ptr(), []).append(weakref.ref(saved))
                saved.let_go()
        for leaf in leaves:
            _empty(leaf)
        if not storages:
            return Left(bytes=0, copy=None)
        away = self._host.put(list(storages.values()), mark)
        size = sum(storage.nbytes() for storage in storages.values())
        self._gone[microbatch] = _Gone(away=away, bytes=size, handles=list(handles.values()))
        return Left(bytes=size, copy=away.copy)

    def come_back(self, microbatch: int, mark: Mark | None) -> Left:
        """RELOAD: as many bytes as left."""
        gone = self._gone.get(microbatch)
        if gone is None:
            return Left(bytes=0, copy=None)
        gone.back = self._host.get(gone.away, mark)
        return Left(bytes=gone.bytes, copy=gone.back)

    def arrive(self, microbatch: int) -> None:
        """The backward begins: wait until everything is back. PipelineError where a copy failed."""
        gone = self._gone.pop(microbatch, None)
        if gone is None:
            return
        assert gone.back is not None
        gone.back.wait()
        for handles, storage in zip(gone.handles, gone.back.storages, strict=True):
            for saved in _alive(handles):
                saved.storage = storage
        gone.back.storages = ()

    def reset(self) -> None:
        """Forget every microbatch."""
        self._here.clear()
        self._gone.clear()

    def _leaving(self, saved: _Saved) -> torch.UntypedStorage | None:
        """The storage that leaves with a saved tensor; None where it stays."""
        tensor = saved.tensor
        if type(tensor) not in _PLAIN or not _is_simple(tensor):
            return None
        storage = tensor.untyped_storage()
        stays = storage.nbytes() == 0 or storage.data_ptr() in self._staying.places
        return None if stays else storage


def _keep(handles: list[weakref.ref[_Saved]], tensor: torch.Tensor) -> _Saved:
    saved = _Saved.of(tensor)
    handles.append(weakref.ref(saved))
    return saved


def _alive(handles: Iterable[weakref.ref[_Saved]]) -> Iterator[_Saved]:
    return (saved for saved in (handle() for handle in handles) if saved is not None)


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether its bytes, shape and strides are all there is to it."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()  # a derivative taken forwards has zeros without memory
    )


def _empty(leaf: torch.Tensor) -> None:
    """Let go of a leaf's memory: autograd looks at its shape when it adds to .grad, no further."""
    one = torch.empty((), dtype=leaf.dtype, device=leaf.device)
    leaf.data = one.expand(leaf.shape)


def host_of(device: torch.device, folder: Path | None) -> Host[Any]:
    """For stages on a device. folder: of the file on CPU; None: the system's temporary one."""
    return PinnedHost(device) if device.type == "cuda" else FileHost(folder)


class Offloading:
    """What of a rank's stages leaves, and the host that it goes to.

    schedule: of training. stages: this rank's modules. host: closed with this.
    """

    def __init__(
        self, schedule: Schedule, stages: Mapping[int, nn.Module], host: Host[Any]
    ) -> None:
        self._modules, self._host, self._staying = list(stages.values()), host, _Staying()
        self.stages: dict[int, Offload] = {}
        for stage in stages:
            program = schedule.programs[schedule.placement.stage_to_rank[stage]]
            leaving = program.microbatch[(program.kind == Kind.OFFLOAD) & (program.stage == stage)]
            if len(leaving):
                self.stages[stage] = Offload(leaving.tolist(), host, self._staying)

    def begin(self, batch: Batch) -> None:
        """A step begins: what its modules and its batch hold stays where it is."""
        if self.stages:
            given = pytree.tree_leaves([batch.inputs, batch.targets, batch.kwargs])
            places = storages_of(t for t in given if isinstance(t, torch.Tensor))
            for module in self._modules:
                places |= storages_of(tensors_of(module))
            self._staying.places = places

    def close(self) -> None:
        """Let go of the host."""
        for offload in self.stages.values():
            offload.reset()
        self._host.close()
