"""Recomputation: what a forward saves for its backward is dropped, and made again when needed.

A region is one call, of a stage or of one of its blocks, of which autograd keeps the graph but not
the saved tensors. They come back all at once: where the backward first asks for one, or ahead of
that, in a bubble, where the schedule says `R`. A forward runs twice, never more.

torch.utils.checkpoint does the same where a model asks for it itself; what it lacks is the second
way, to begin before the backward does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from fullbore.errors import PipelineError
from fullbore.ir import Kind, Schedule
from fullbore.runtime.changing import BuffersBefore, ChangingBuffers

__all__ = [
    "Recomputation",
    "Recompute",
    "Restored",
    "blocks_of",
    "is_recomputed_whole",
    "most_blocks",
    "recomputation_of",
    "where_placed",
]

Recompute = Literal["none", "full", "placed"] | int
Restored = Callable[[int, Iterable[torch.Tensor]], None]


@dataclass(slots=True, weakref_slot=True, kw_only=True)
class _Handle:
    """Stands in the graph for a saved tensor; the tensor lives as long as it."""

    shape: torch.Size
    dtype: torch.dtype
    tensor: torch.Tensor | None = None


class _Region:
    """One call whose saved tensors are made again."""

    def __init__(
        self, call: Callable[[Any], Any], given: Any, what: str, buffers: ChangingBuffers
    ) -> None:
        """call: what is run, twice. given: its argument, any nest of tensors."""
        self._call, self._given, self._what = call, given, what
        self._buffers, self._before = buffers, BuffersBefore()
        self._tensors = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]
        self._versions = [t._version for t in self._tensors]
        device = next((t.device for t in self._tensors), torch.device("cpu"))
        self._surroundings = _Surroundings.of(device)
        self._handles: list[weakref.ref[_Handle]] = []
        self.is_done = self._is_begun = False
        self.restore: Callable[[], None] = self.make_again

    @property
    def inputs(self) -> list[torch.Tensor]:
        """What is kept to make the rest again."""
        return self._tensors

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Around the first run."""
        self._is_begun = True
        with (
            self._buffers.first_run() as self._before,
            saved_tensors_hooks(self._drop, self._take),
        ):
            yield
        self._is_begun = False

    def _drop(self, tensor: torch.Tensor) -> _Handle:
        handle = _Handle(shape=tensor.shape, dtype=tensor.dtype)
        self._handles.append(weakref.ref(handle))
        return handle

    def _take(self, handle: _Handle) -> torch.Tensor:
        if self._is_begun:
            raise PipelineError(
                f"{self._what} takes a derivative inside its own forward, and so cannot be "
                'recomputed: leave it out with recompute="none" or fewer blocks'
            )
        if not self.is_done:
            self.restore()
        if handle.tensor is None:
            raise PipelineError(f"{self._what} does not do the same when it is run again")
        return handle.tensor

    def make_again(self) -> None:
        """Run the call a second time, for its saved tensors alone."""
        self.is_done = True
        if self._versions != [t._version for t in self._tensors]:
            raise PipelineError(
                f"{self._what} cannot be recomputed, since its input was changed in place: change "
                'a copy, or leave it out of recomputation with recompute="none"'
            )
        remaining = iter(self._handles)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            handle = next(remaining, _missing)()
            if handle is not None and (handle.shape, handle.dtype) == (tensor.shape, tensor.dtype):
                handle.tensor = tensor
            return tensor

        with (
            self._before.again(),
            self._surroundings.again(),
            saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            self._call(pytree.tree_map(_detached, self._given))
        self._given = None

    def restored(self) -> list[torch.Tensor]:
        """What has come back and is still needed."""
        alive = [handle for handle in (ref() for ref in self._handles) if handle is not None]
        return [handle.tensor for handle in alive if handle.tensor is not None]


def _missing() -> None:
    return None


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surroundings:
    """What a forward depends on beside its arguments: random numbers and autocast."""

    device: torch.device
    random: torch.Tensor
    random_on_device: torch.Tensor | None
    autocast: dict[str, torch.dtype | None]  # by device type; None: off

    @staticmethod
    def of(device: torch.device) -> _Surroundings:
        """As they are now."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return _Surroundings(
            device=device,
            random=torch.get_rng_state(),
            random_on_device=on_device,
            autocast={
                kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
                for kind in dict.fromkeys(("cpu", device.type))
            },
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """As they were then."""
        devices = [self.device] if self.random_on_device is not None else []
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices))
            torch.set_rng_state(self.random)
            if self.random_on_device is not None:
                torch.cuda.set_rng_state(self.random_on_device, self.device)
            for kind, dtype in self.autocast.items():
                on = dtype is not None
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on))
            stack.enter_context(torch.enable_grad())
            yield


class Recomputation:
    """What one stage recomputes: itself as a whole, or some of its blocks one by one.

    blocks: None for the whole stage. restored: who is told, where anyone is, what came back for
    which microbatch.
    """

    def __init__(self, stage: nn.Module, blocks: Sequence[nn.Module] | None) -> None:
        self.restored: Restored | None = None
        self._whole = stage if blocks is None else None
        self._buffers = {m: ChangingBuffers(m) for m in ([stage] if blocks is None else blocks)}
        self._live: dict[int, list[_Region]] = {}
        self._current: list[_Region] | None = None
        self._microbatch = 0
        self._open: list[AbstractContextManager[None]] = []
        self._hooks = [
            hook
            for block in blocks or ()
            for hook in (
                block.register_forward_pre_hook(self._enter, with_kwargs=True),
                block.register_forward_hook(self._leave, always_call=True, prepend=True),
            )
        ]

    def run(self, microbatch: int, call: Callable[[Any], Any], given: Any) -> Any:
        """The forward of a microbatch: call(given), of which parts will be run again."""
        self._current = self._live[microbatch] = []
        self._microbatch = microbatch
        try:
            if self._whole is None:
                return call(given)
            with self._region(call, given, "the stage", self._whole).first_run():
                return call(given)
        finally:
            self._current = None
            while self._open:  # only after an error that passed a hook by
                self._open.pop().__exit__(None, None, None)

    def ahead(self, microbatch: int) -> None:
        """R: bring everything back now."""
        for region in self._live[microbatch]:
            if not region.is_done:
                region.make_again()
        self._tell(microbatch, self._live[microbatch])

    def kept(self, microbatch: int) -> Iterator[torch.Tensor]:
        """What a forward keeps to make the rest again."""
        for region in self._live.get(microbatch, ()):
            yield from region.inputs

    def forget(self, microbatch: int) -> None:
        """The backward is done."""
        self._live.pop(microbatch, None)

    def reset(self) -> None:
        """Forget every microbatch."""
        self._live.clear()

    def close(self) -> None:
        """Leave the blocks as they were."""
        for hook in self._hooks:
            hook.remove()

    def _region(
        self, call: Callable[[Any], Any], given: Any, what: str, module: nn.Module
    ) -> _Region:
        region = _Region(call, given, what, self._buffers[module])
        microbatch = self._microbatch

        def restore() -> None:
            region.make_again()
            self._tell(microbatch, [region])

        region.restore = restore
        assert self._current is not None
        self._current.append(region)
        return region

    def _tell(self, microbatch: int, regions: Sequence[_Region]) -> None:
        if self.restored is not None:
            self.restored(microbatch, (t for region in regions for t in region.restored()))

    def _enter(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """The last hook in front of a block: what others made of its arguments is kept."""
        if self._current is None or self._open:
            return  # not in a first run, or inside another block
        region = self._region(
            lambda given: block.forward(*given[0], **given[1]),
            (args, kwargs),
            type(block).__name__,
            block,
        )
        run = region.first_run()
        run.__enter__()
        self._open.append(run)

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        """The first hook behind a block."""
        if self._current is not None and self._open:
            self._open.pop().__exit__(None, None, None)


def blocks_of(stage: nn.Module) -> list[nn.Module] | None:
    """The blocks of a stage: the members of a Sequential, or of the one ModuleList in it.

    Members without parameters (such as those that stand for other stages' blocks) do not count.
    None where it is neither.
    """
    lists = [stage] if isinstance(stage, nn.Sequential) else _outer_lists(stage)
    if len(lists) != 1:
        return None
    return [block for block in lists[0].children() if any(True for _ in block.parameters())]


def _outer_lists(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList):
        return [module]
    return [found for child in module.children() for found in _outer_lists(child)]


def where_placed(recompute: Recompute, schedule: Schedule, stage: int) -> Recompute:
    """What `Pipeline(recompute=...)` says for one stage: "placed" is "full" where it has an R."""
    if recompute != "placed":
        return recompute
    return "full" if schedule.has(Kind.R, stage=stage) else "none"


def recomputation_of(stage: nn.Module, recompute: Recompute) -> Recomputation | None:
    """As `where_placed` says; a stage of which no blocks are known is taken whole."""
    if recompute == "none" or recompute == 0:
        return None
    return Recomputation(stage, _chosen_blocks(stage, recompute))


def is_recomputed_whole(stage: nn.Module, recompute: Recompute) -> bool:
    """Whether a forward would keep nothing but its input."""
    return recompute not in ("none", 0) and _chosen_blocks(stage, recompute) is None


def most_blocks(stages: Iterable[nn.Module]) -> int:
    """How many blocks the largest of some stages has that can be recomputed by themselves."""
    return max((len(_hooked_blocks(stage) or ()) for stage in stages), default=0)


def _chosen_blocks(stage: nn.Module, recompute: Recompute) -> list[nn.Module] | None:
    blocks = None if recompute == "full" else _hooked_blocks(stage)
    return None if blocks is None else blocks[: int(recompute)]


def _hooked_blocks(stage: nn.Module) -> list[nn.Module] | None:
    blocks = blocks_of(stage)
    if blocks is None or any(block._compiled_call_impl is not None for block in blocks):
        return None  # the hooks of compiled blocks are compiled with them
    return blocks
