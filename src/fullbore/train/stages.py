"""One stage of a causal language model: its own blocks, run by the model's own forward.

Masks, rotary embeddings, layer types and soft-capping are right in every family because nothing of
them is written again here: a stage runs the whole model's forward, in which blocks of other stages
hand their input on, embeddings of other stages give zeros, and at the cut the hidden states that
arrived take the place of those. Layers keep their places in the list, so every index that a
configuration or a forward uses keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullbore.errors import ModelError
from fullbore.train.anatomy import Anatomy, copy_plain_attributes, replace_module
from fullbore.train.carried import Carried, cache_argument, cache_of, carried_in, tokens_of

__all__ = ["Part", "Stage", "parts_of", "shared_weights", "token_loss"]

_PREFIX = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one stage holds: layers first_layer..end_layer-1, and what stands at the ends."""

    stage: int
    first_layer: int
    end_layer: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> int:
        """How many it holds."""
        return self.end_layer - self.first_layer

    def holds(self, anatomy: Anatomy, name: str) -> bool:
        """Whether a module or weight of this dotted name belongs to the part."""
        if name.startswith(f"{anatomy.blocks}."):
            layer = int(name.removeprefix(f"{anatomy.blocks}.").partition(".")[0])
            return self.first_layer <= layer < self.end_layer
        if _inside(name, anatomy.before):
            return self.is_first
        return self.is_last if _inside(name, anatomy.after) else True


def parts_of(anatomy: Anatomy, stage_layers: Sequence[int]) -> tuple[Part, ...]:
    """The parts of a model whose stages have these numbers of layers.

    The first stage holds the embeddings too and the last one the final norm and the head, so these
    two may have no layer; any other stage without one is refused (ModelError).
    """
    stages = len(stage_layers)
    if sum(stage_layers) != anatomy.layers or min(stage_layers) < 0:
        raise ModelError(
            f"stages of {_listed(stage_layers)} layers hold {sum(stage_layers)} layers, but "
            f"{anatomy.family} has {anatomy.layers}"
        )
    for stage in range(1, stages - 1):
        if stage_layers[stage] == 0:
            raise ModelError(
                f"stage {stage} of {stages} would be empty ({_listed(stage_layers)} layers): "
                "give it a layer, or use fewer stages"
            )
    ends = [sum(stage_layers[: stage + 1]) for stage in range(stages)]
    return tuple(
        Part(
            stage=stage,
            first_layer=ends[stage] - stage_layers[stage],
            end_layer=ends[stage],
            is_first=stage == 0,
            is_last=stage == stages - 1,
        )
        for stage in range(stages)
    )


def shared_weights(anatomy: Anatomy, parts: Sequence[Part]) -> list[dict[int, str]]:
    """Weights that several stages hold a copy of, as `Pipeline(tied=...)` takes them.

    Each entry maps a stage to the weight's name in that stage's module.
    """
    groups: dict[str, dict[int, str]] = {}
    for alias, source in anatomy.tied.items():
        for name in (source, alias):
            for part in parts:
                if part.holds(anatomy, name):
                    groups.setdefault(source, {}).setdefault(part.stage, _PREFIX + name)
    return [group for group in groups.values() if len(group) > 1]


class Stage(nn.Module):
    """One part of a model as a module: token ids or hidden states in, hidden states or logits out.

    Forward takes ids [b, s] on the first stage, else hidden states [b, s, h], and gives hidden
    states [b, s, h], on the last stage logits [b, s, V]. The model's weights keep their names
    behind "model.". The model that is passed in, mostly on the meta device, becomes the stage.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, part: Part) -> None:
        super().__init__()
        self.part = part
        self._anatomy = anatomy
        self._received: Tensor | None = None
        self._captured: Tensor | None = None
        _remove_other_parts(model, anatomy, part)
        if not part.is_first:
            entry = model.get_submodule(anatomy.boundary(part.first_layer))
            entry.register_forward_pre_hook(self._enter, with_kwargs=True)
        if not part.is_last:
            leave = model.get_submodule(anatomy.boundary(part.end_layer))
            leave.register_forward_pre_hook(self._leave, with_kwargs=True)
        self.model = model

    def forward(self, value: Tensor, carry: Carried | tuple[()] | None = None) -> Any:
        """Run this part on one microbatch, or on one slice of its sequences.

        carry: None, or with sequences in slices what the slice before gave, () for the first one;
        then the result is a pair, of which the second is for the next slice.
        """
        if carry is None:
            return self._run(value, use_cache=False)
        runs = self._runs()
        cache = cache_of(carry, layers=self._anatomy.layers, first=self.part.first_layer)
        output = self._run(value, use_cache=True, **{cache_argument(runs): cache})
        own = range(self.part.first_layer, self.part.end_layer)
        return output, carried_in(cache, own, tokens=tokens_of(carry) + value.shape[1])

    def _run(self, value: Tensor, **options: Any) -> Tensor:
        given = {"input_ids": value} if self.part.is_first else {"inputs_embeds": value.detach()}
        self._received = None if self.part.is_first else value
        try:
            output = self._runs()(**given, **options)
            captured = self._captured
        finally:
            self._received = self._captured = None
        if self.part.is_last:
            logits: Tensor = output.logits
            return logits
        assert captured is not None
        return captured

    def weight_names(self) -> dict[str, str]:
        """This module's weight names -> the names that the whole model's files use.

        Two names of one weight inside the stage are told once; a copy of a weight that another
        stage owns goes by the owner's name.
        """
        tied = self._anatomy.tied
        names = {name: name.removeprefix(_PREFIX) for name, _ in self.named_parameters()}
        return {name: tied.get(told, told) for name, told in names.items()}

    def kept_buffers(self) -> dict[str, Tensor]:
        """Buffers that belong into files, by the names that the whole model's files use."""
        weights = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        kept = self.state_dict(keep_vars=True).items()
        return {name.removeprefix(_PREFIX): value for name, value in kept if name not in weights}

    def _runs(self) -> nn.Module:
        """The model, or without its head where that is not needed."""
        base: nn.Module = self.model.base_model  # type: ignore[assignment]
        if self.part.is_last:
            return self.model
        tail = self.model.get_submodule(self._anatomy.boundary(self.part.end_layer))
        return base if any(module is tail for module in base.modules()) else self.model

    def _enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """In front of the first own module: what arrived takes the place of what was computed."""
        assert self._received is not None
        takes = self._anatomy.boundary_arguments[self.part.first_layer]
        return takes.put(args, kwargs, self._received)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In front of the first module that is not ours any more: its input is our output."""
        self._captured = self._anatomy.boundary_arguments[self.part.end_layer].take(args, kwargs)


def _remove_other_parts(model: nn.Module, anatomy: Anatomy, part: Part) -> None:
    for layer in range(anatomy.layers):
        if not part.first_layer <= layer < part.end_layer:
            name = f"{anatomy.blocks}.{layer}"
            absent = _AbsentBlock(anatomy, layer)
            copy_plain_attributes(model.get_submodule(name), absent)
            replace_module(model, name, absent)
    if not part.is_first:
        for name, width in anatomy.before.items():
            replace_module(model, name, _Absent(width=width))
    if not part.is_last:
        for name in anatomy.after:
            replace_module(model, name, _Absent(width=None))


class _AbsentBlock(nn.Module):
    """A block of another stage: hands its input on."""

    def __init__(self, anatomy: Anatomy, layer: int) -> None:
        super().__init__()
        self._takes = anatomy.boundary_arguments[layer]
        self._gives_tuple = anatomy.blocks_return_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._takes.take(args, kwargs)
        return (hidden,) if self._gives_tuple else hidden


class _Absent(nn.Module):
    """A module of another stage: an embedding of `width` gives zeros, the rest its input."""

    def __init__(self, *, width: int | None) -> None:
        super().__init__()
        self._width = width

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        # of a slice's positions and a mask over all tokens so far, the positions
        value = min(given, key=Tensor.numel) if self._width is not None else given[0]
        if self._width is None:
            return value
        return torch.zeros(1, device=value.device).expand(*value.shape, self._width)


def _inside(name: str, modules: Any) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits [b, s, V] against token ids [b, s], in 32 bits."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
