"""A checkpoint as a Hugging Face folder of safetensors, which `transformers` loads as any other.

The checkpoint carries its configuration and tokenizer, so nothing else is needed; this process
holds the whole model once.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

from fullbore.errors import CheckpointError
from fullbore.files import move_folder
from fullbore.train.build import empty_model
from fullbore.train.checkpoint import (
    find_checkpoint,
    model_folder_of,
    read_progress,
    read_state,
)
from fullbore.train.sources import quietly, read_config

__all__ = ["export"]


def export(checkpoint: Path, target: Path) -> Path:
    """Write the model of a checkpoint to a new folder `target` and return that.

    checkpoint: one, or the folder of a run, whose newest is taken. Weights have the type that
    they were trained in. Raises CheckpointError; `target` is whole or not there.
    """
    checkpoint = find_checkpoint(checkpoint)
    if target.exists():
        raise CheckpointError(f"{target} exists already: export to a folder that does not")
    dtype = getattr(torch, read_progress(checkpoint).dtype)
    model = empty_model(read_config(model_folder_of(checkpoint)))
    _fill(model, checkpoint, dtype)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-") as temporary:
            made = Path(temporary) / target.name
            model.config.use_cache = True
            with quietly():
                model.save_pretrained(made)
            for path in model_folder_of(checkpoint).iterdir():
                if not (made / path.name).exists():
                    shutil.copy(path, made)
            move_folder(made, target)
    except OSError as error:
        raise CheckpointError(f"cannot export to {target}: {error}") from error
    return target


def _fill(model: nn.Module, checkpoint: Path, dtype: torch.dtype) -> None:
    """Read every weight and every buffer that is kept, and give it to the model by all its names.

    Weights get the type, buffers keep theirs.
    """
    names: dict[int, list[str]] = {}
    kept = model.state_dict(keep_vars=True)
    for name, tensor in kept.items():
        names.setdefault(id(tensor), []).append(name)
    state = {
        f"model.{told[0]}": torch.empty(kept[told[0]].shape, dtype=kept[told[0]].dtype)
        for told in names.values()
    }
    read_state(state, checkpoint=checkpoint)
    for told in names.values():
        value = state.pop(f"model.{told[0]}")
        weight = nn.Parameter(value.to(dtype)) if _is_weight(kept[told[0]]) else None
        for name in told:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            if weight is not None:
                module._parameters[leaf] = weight
            else:
                module._buffers[leaf] = value
    model.config.dtype = dtype


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)
