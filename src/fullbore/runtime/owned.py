"""Memory that outlives a message: outputs in it are copied before they are sent.

A message travels from the very memory of the output, while its rank goes on computing. That is
safe for what a forward has just made. It is not where the output is memory that the module keeps
(a buffer, a cache among its attributes) or that several microbatches were given, which a later
microbatch may change in place before the message has left.

What a module keeps is looked up at the stage's first forward, and once in each step that hands out
something that autograd did not make (a mask, a buffer; in an evaluation everything), since the
lookup walks through all submodules. Other outputs cost one look into a set. Not seen: memory that
a module reaches in other ways, such as a closure, and attributes that hold other memory later than
that; a stage that hands out such memory and changes it must return a clone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fullbore.runtime.sharded import local_part

__all__ = ["OwnedMemory", "storages_of", "tensors_of"]


class OwnedMemory:
    """The memory that one stage's module keeps, and what microbatches share, within a step."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._shared: set[int] = set()
        self._kept: set[int] = set()
        self._looked = self._looked_in_step = self._keeps_outputs = False

    def begin(self, *entries: Sequence[Any]) -> None:
        """A step begins; entries: lists with one entry a microbatch that the stage may be given."""
        self._looked_in_step = False
        self._shared = {place for given in entries for place in _shared(given)}

    def apart(self, output: Any) -> Any:
        """The output of a forward; tensors are copied where their memory is not theirs alone."""
        is_one = isinstance(output, torch.Tensor)
        tensors = [output] if is_one else list(filter(torch.is_tensor, pytree.tree_leaves(output)))
        if not self._looked_in_step and (
            not self._looked or any(tensor.grad_fn is None for tensor in tensors)
        ):
            self._look(tensors)
        if not self._kept and not self._shared:
            return output
        own = [tensor for tensor in tensors if self._keeps_outputs or self._owns(tensor)]
        return _with_copies(output, {id(tensor) for tensor in own}) if own else output

    def _look(self, outputs: list[torch.Tensor]) -> None:
        self._looked = self._looked_in_step = True
        self._kept = storages_of(tensors_of(self._module))
        self._keeps_outputs = not self._kept.isdisjoint(storages_of(outputs))

    def _owns(self, tensor: torch.Tensor) -> bool:
        place = _storage(tensor)
        return place in self._kept or place in self._shared


def _with_copies(output: Any, ids: set[int]) -> Any:
    """Copies stand for these tensors; each still wants a gradient where it did."""

    def copied(leaf: Any) -> Any:
        return leaf.clone() if id(leaf) in ids else leaf

    return pytree.tree_map(copied, output)


def _storage(tensor: torch.Tensor) -> int:
    """0 where there is none of its own, as of a sparse tensor, which no message can be."""
    if tensor.layout is not torch.strided:
        return 0
    return local_part(tensor).untyped_storage().data_ptr()


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The addresses of the memory that some tensors lie in."""
    return {place for place in map(_storage, tensors) if place}


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and tensors among the attributes, also in lists, tuples and dicts."""
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, dict):
                yield from (entry for entry in value.values() if isinstance(entry, torch.Tensor))
            elif isinstance(value, list | tuple):
                yield from (entry for entry in value if isinstance(entry, torch.Tensor))


def _shared(entries: Sequence[Any]) -> set[int]:
    """The memory of tensors that stand in the entries of more than one microbatch."""
    seen: set[int] = set()
    shared: set[int] = set()
    for entry in entries:
        here = {id(leaf): leaf for leaf in pytree.tree_leaves(entry) if torch.is_tensor(leaf)}
        shared |= storages_of(leaf for key, leaf in here.items() if key in seen)
        seen |= set(here)
    return shared
