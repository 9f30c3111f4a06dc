"""The safetensors files of a model folder, of which a stage reads its own tensors only.

Files may call a weight otherwise than the model does, or keep one weight as many tensors (the
experts of a mixture). Transformers knows how, family by family, so its own table of conversions
decides which tensors of the files make a weight; nothing of that table is repeated here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullbore.errors import ModelError

__all__ = ["WeightFiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """How one or several weights come from tensors of the files: read as is, or converted."""

    tensors: list[tuple[str, str]]  # name in the files, and the converter's pattern for it
    converter: Any = None


class WeightFiles:
    """Which tensors of a model folder make which weight of the model."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        """Read the folder's index; model: the whole model on the meta device.

        Raises ModelError where the folder has no readable safetensors.
        """
        self.folder = folder
        self._model = model
        try:
            self._files = _index(folder)
        except (OSError, KeyError, ValueError) as error:
            raise ModelError(f"cannot read the weights in {folder}: {error}") from error
        if not self._files:
            raise ModelError(f"{folder} has no *.safetensors file, so no weights to read")
        self._recipes = _recipes(list(self._files), model)

    def __contains__(self, name: str) -> bool:
        """Whether the files have a weight or buffer of this name, or what comes first with it."""
        return name in self._recipes

    def read_into(self, weights: Mapping[str, Tensor]) -> None:
        """Fill tensors, given by the model's names for them, reading no other.

        Raises ModelError where one is missing or has another shape.
        """
        missing = set(weights)
        for name, recipe in self._recipes.items():
            if recipe.converter is None and name not in weights:
                continue
            if recipe.converter is not None and not _near(name, missing):
                continue
            for told, value in self._cook(name, recipe).items():
                if told in missing:
                    _fill(weights[told], value, told)
                    missing.discard(told)
        if missing:
            raise ModelError(
                f"{self.folder} lacks {len(missing)} weights of the model, such as "
                f"{min(missing)!r}: its files do not fit its config.json"
            )

    def _cook(self, name: str, recipe: _Recipe) -> dict[str, Tensor]:
        if recipe.converter is None:
            return {name: self._read(recipe.tensors[0][0])}
        converter = copy.deepcopy(recipe.converter)
        for stored, pattern in recipe.tensors:
            converter.add_tensor(name, stored, pattern, self._read(stored))
        made = converter.convert(name, model=self._model, config=self._model.config)
        made = made[0] if isinstance(made, tuple) else made  # with a report, in transformers 5.0
        return {told: v[0] if isinstance(v, list) else v for told, v in made.items()}

    def _read(self, stored: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self.folder / self._files[stored]
        try:
            with safe_open(path, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(stored)
                return tensor
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {stored!r} from {path}: {error}") from error


def _recipes(stored: list[str], model: Any) -> dict[str, _Recipe]:
    """For each weight that comes first from a conversion: how it is made."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known = model.state_dict()
    recipes: dict[str, _Recipe] = {}
    for key in sorted(stored, key=_natural):
        name, pattern = rename_source_key(
            key, renamings, converters, model.base_model_prefix, known
        )
        if name not in known and key in known:
            name, pattern = key, None
        converter = by_pattern.get(pattern) if pattern is not None else None
        recipe = recipes.setdefault(name, _Recipe(tensors=[], converter=converter))
        recipe.tensors.append((key, pattern or key))
    return recipes


def _near(name: str, wanted: set[str]) -> bool:
    """Whether a conversion named by its first weight can make one of these: same module."""
    module = name.rpartition(".")[0]
    return any(weight == name or weight.startswith(f"{module}.") for weight in wanted)


def _natural(name: str) -> list[int | str]:
    """Sorts layers.2 before layers.10: a conversion takes its tensors in this order."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def _fill(weight: Tensor, value: Tensor, name: str) -> None:
    if weight.shape != value.shape:
        raise ModelError(
            f"the weight {name!r} has shape {list(value.shape)} in the files and "
            f"{list(weight.shape)} in the model: config.json does not fit the weights"
        )
    with torch.no_grad():
        weight.copy_(value)


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return listed
    return {
        name: path.name for path in sorted(folder.glob("*.safetensors")) for name in _names(path)
    }


def _names(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            return list(opened.keys())
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error
