"""Where a causal language model can be cut: found by looking at it, not by a table of names.

A model is built without memory, and its own forward is run once on four tokens with every block
and every other module that has weights replaced by a stand-in which only notes when it was called.
That shows which weights belong before the blocks, which behind them, how hidden states are handed
on, and whether anything else flows between blocks. A model that passes can be cut between any two
blocks, whatever family it is; one that does not is refused, by name and reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fullbore.errors import ModelError
from fullbore.train.initial import restore_buffers

__all__ = ["Anatomy", "Arguments", "copy_plain_attributes", "examine", "replace_module"]

_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """How a module takes its hidden states: by position 0, or under a name."""

    name: str | None

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The hidden states among a call's arguments."""
        return args[0] if self.name is None else kwargs[self.name]

    def put(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with other hidden states."""
        if self.name is None:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, self.name: hidden}


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a causal language model, as dotted module names.

    blocks: the ModuleList of L layers. before: modules with weights that run ahead of the blocks,
    with the width [h] that an embedding gives, or None where one changes hidden states. after:
    those that run behind them (final norm, head). tail: the module that takes the last block's
    hidden states, mostly the final norm.
    boundary_arguments [L + 1]: how block k, and at L the tail, takes its hidden states.
    blocks_return_tuple: whether a block gives (hidden, ...). tied: weight
    name -> name of the weight that it shares storage with, such as head -> embedding.
    """

    family: str
    layers: int
    blocks: str
    before: dict[str, int | None]
    after: tuple[str, ...]
    tail: str
    boundary_arguments: tuple[Arguments, ...]
    blocks_return_tuple: bool
    tied: dict[str, str]

    def boundary(self, layer: int) -> str:
        """The module that takes the hidden states at this cut: block `layer`, or the tail."""
        return f"{self.blocks}.{layer}" if layer < self.layers else self.tail


def examine(model: nn.Module) -> Anatomy:
    """Find the parts of a causal language model that was built on the meta device.

    The model is used up: its blocks and weights are replaced by stand-ins. Raises ModelError, with
    family and reason, where it cannot be cut between blocks.
    """
    family = type(model).__name__
    tied = _tied(model)
    blocks = _find_blocks(model, family)
    layers = len(_blocks_of(model, blocks))
    owners = _owners(model, blocks, family)
    restore_buffers(model, _outside(model, [blocks, *owners]))
    trace, returns_tuple = _trace(model, family, blocks=blocks, owners=owners)
    before, after = trace.sides(family)
    tail = trace.find_tail(family)
    return Anatomy(
        family=family,
        layers=layers,
        blocks=blocks,
        before=before,
        after=after,
        tail=tail,
        boundary_arguments=tuple(trace.arguments[name] for name in (*trace.block_names, tail)),
        blocks_return_tuple=returns_tuple,
        tied=tied,
    )


def _trace(model: nn.Module, family: str, *, blocks: str, owners: list[str]) -> tuple[_Trace, bool]:
    """The run in which hidden states pass from block to block, and whether blocks give tuples."""
    errors = []
    for returns_tuple in (False, True):
        trace = _Trace(model, blocks=blocks, owners=owners, returns_tuple=returns_tuple)
        try:
            trace.run()
        except Exception as error:  # the model's own code: it may raise anything
            errors.append(error)
        else:
            if trace.chained:
                return trace, returns_tuple
    if len(errors) == 2:
        reason = f"its forward does not run on token ids alone ({_short(errors[0])})"
        raise _refuse(family, reason) from errors[0]
    raise _refuse(family, "something happens to the hidden states between its blocks")


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of the one with this dotted name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def copy_plain_attributes(source: nn.Module, target: nn.Module) -> None:
    """Copy the numbers and names that a model's forward may ask a block for, nothing else."""
    for name, value in vars(source).items():
        plain = value is None or isinstance(value, bool | int | float | str)
        if plain and not name.startswith("_") and name != "training":
            setattr(target, name, value)


def _refuse(family: str, reason: str) -> ModelError:
    return ModelError(
        f"{family} cannot be cut into pipeline stages: {reason}. Supported is a causal language "
        "model whose layers sit in one list and hand on nothing but hidden states"
    )


def _find_blocks(model: nn.Module, family: str) -> str:
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise _refuse(family, "it is an encoder-decoder model")
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < 1:
        raise _refuse(family, "its configuration does not say how many layers it has")
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == layers and not inside:
            found.append(name)
    if not found:
        raise _refuse(family, f"it has no ModuleList of {layers} layers")
    if len(found) > 1:
        raise _refuse(family, f"it has several ModuleLists of {layers}: {', '.join(found)}")
    if len(set(_blocks_of(model, found[0]))) != layers:
        raise _refuse(family, f"several entries of {found[0]} are one and the same layer")
    return found[0]


def _blocks_of(model: nn.Module, name: str) -> list[nn.Module]:
    blocks = model.get_submodule(name)
    assert isinstance(blocks, nn.ModuleList)
    return list(blocks)


def _owners(model: nn.Module, blocks: str, family: str) -> list[str]:
    """Modules outside the blocks that own weights, in registration order."""
    owners = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(f"{blocks}.") or not any(True for _ in module.parameters(recurse=False)):
            continue
        if f"{blocks}.".startswith(f"{name}.") or not name:
            weight = next(iter(dict(module.named_parameters(recurse=False))))
            raise _refuse(family, f"the weight {weight!r} belongs to none of its parts")
        owners.append(name)
    return owners


def _outside(model: nn.Module, parts: list[str]) -> list[str]:
    """Modules that are neither one of these parts nor inside one."""
    return [
        name
        for name, _ in model.named_modules()
        if not any(f"{name}.".startswith(f"{part}.") for part in parts)
    ]


def _tied(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tied = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(weight), name) != name:
            tied[name] = first[id(weight)]
    return tied


class _Trace:
    """One run of the model's own forward over stand-ins."""

    def __init__(
        self, model: nn.Module, *, blocks: str, owners: list[str], returns_tuple: bool
    ) -> None:
        self.model, self.owners = model, owners
        self.calls: list[str] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.arguments: dict[str, Arguments] = {}
        self.extra: dict[str, str] = {}  # block -> its first argument that needs gradients
        layers = len(_blocks_of(model, blocks))
        self.block_names = [f"{blocks}.{index}" for index in range(layers)]
        for name in self.block_names:
            self._stand_in(name, _StandIn(self._block_called(name, returns_tuple=returns_tuple)))
        for name in owners:
            original = model.get_submodule(name)
            if isinstance(original, _StandIn):  # left by the run before
                original = original.original
            self._stand_in(name, _StandIn(self._owner_called(name, original), original))
        for name, module in model.named_modules():
            if not isinstance(module, _StandIn) and not f"{blocks}.".startswith(f"{name}."):
                module.register_forward_pre_hook(self._watch(name), with_kwargs=True)

    def _stand_in(self, name: str, module: _StandIn) -> None:
        copy_plain_attributes(self.model.get_submodule(name), module)
        replace_module(self.model, name, module)

    def run(self) -> None:
        ids = torch.zeros((1, _TOKENS), dtype=torch.long)
        with torch.enable_grad():
            self.model.eval()(input_ids=ids, use_cache=False)

    def _block_called(self, name: str, *, returns_tuple: bool) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            hidden, given = self._hidden(name, args, kwargs)
            for argument, value in given.items():
                if value is not hidden and _needs_grad(value):
                    self.extra.setdefault(name, argument)
            self.inputs[name] = hidden
            self.outputs[name] = hidden.detach().clone().requires_grad_()
            return (self.outputs[name],) if returns_tuple else self.outputs[name]

        return called

    def _owner_called(self, name: str, original: nn.Module) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            with torch.device("meta"):
                result = original(*_to_meta(args), **_to_meta(kwargs))
            if not isinstance(result, Tensor):
                raise TypeError(f"{name} gives no tensor")
            hidden = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
            if hidden is not None:
                self.inputs[name] = hidden
                self._hidden(name, args, kwargs)
            self.outputs[name] = torch.zeros(result.shape, requires_grad=True)
            return self.outputs[name]

        return called

    def _watch(self, name: str) -> Callable[..., None]:
        """For a module without weights: note what it is called with."""

        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
                self.inputs[name] = self._hidden(name, args, kwargs)[0]

        return called

    def _hidden(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The hidden states of a call, and all its arguments by name."""
        given = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
        for key, value in given.items():
            if isinstance(value, Tensor):
                self.arguments[name] = Arguments(name=None if key == "0" else key)
                return value, given
        raise TypeError(f"{name} is called without hidden states")

    @property
    def chained(self) -> bool:
        """Whether each block took exactly what the block before gave, all once and in order."""
        called = [name for name in self.calls if name in set(self.block_names)]
        if called != self.block_names:
            return False
        pairs = zip(self.block_names[:-1], self.block_names[1:], strict=True)
        return all(self.inputs[late] is self.outputs[early] for early, late in pairs)

    def sides(self, family: str) -> tuple[dict[str, int | None], tuple[str, ...]]:
        """Which modules with weights run before the blocks, and which after, in call order."""
        for argument in self.extra.values():
            reason = f"its blocks take {argument!r}, which depends on weights outside them"
            raise _refuse(family, reason)
        first = self.calls.index(self.block_names[0])
        last = self.calls.index(self.block_names[-1])
        for name in self.owners:
            where = [index for index, called in enumerate(self.calls) if called == name]
            if not where:
                raise _refuse(family, f"its forward on text never uses {name}, which has weights")
            if any(first < index < last for index in where) or where[0] < first < where[-1]:
                raise _refuse(family, f"{name} is used in several places")
        before = {name: self._width(name) for name in self.calls[:first]}
        return before, tuple(dict.fromkeys(self.calls[last + 1 :]))

    def _width(self, name: str) -> int | None:
        embeds = self.outputs[name].dim() > self.inputs[name].dim()
        return self.outputs[name].shape[-1] if embeds else None

    def find_tail(self, family: str) -> str:
        """The first module that takes the last block's hidden states."""
        last = self.outputs[self.block_names[-1]]
        for name, taken in self.inputs.items():
            if taken is last:
                return name
        raise _refuse(family, "something happens to the hidden states behind its last block")


class _StandIn(nn.Module):
    """Takes a module's place and calls a function instead."""

    def __init__(self, call: Callable[..., Any], original: nn.Module | None = None) -> None:
        super().__init__()
        object.__setattr__(self, "call", call)
        object.__setattr__(self, "original", original)  # not a submodule

    def __getattr__(self, name: str) -> Any:
        """A model may ask its head for the dtype of its weight."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original")
            if original is None:
                raise
            return getattr(original, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _needs_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(_needs_grad(item) for item in value)


def _to_meta(value: Any) -> Any:
    """Arguments moved to the meta device."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return tuple(_to_meta(item) for item in value) if isinstance(value, tuple) else value


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]
