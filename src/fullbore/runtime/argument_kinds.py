"""Whether a pipeline's arguments are the kinds of things that they must be.

Python would find out in the middle of making the pipeline, on the one rank that was given them;
the others would wait for it. So it is asked first, and told to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

from fullbore.ir import Schedule

__all__ = ["LONGEST_S", "is_duration", "objection_to_kinds"]

LONGEST_S = 24 * 24 * 3600  # 24 days: whoever waits in milliseconds has 31 bits for them


def objection_to_kinds(given: Mapping[str, Any]) -> str | None:
    """What is wrong with a pipeline's arguments by name, or None; needs no other rank."""
    for name, is_right, wanted in _KINDS:
        if not is_right(given[name]):
            return f"{name} is {wanted}, not {_shown(given[name])}"
    return _objection_to_device(given["device"])


def is_duration(value: Any) -> bool:
    """Whether this is a number of seconds that one can wait."""
    return _is_number(value) and 0 < value <= LONGEST_S


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_stages(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(stage, int) and isinstance(module, nn.Module) for stage, module in value.items()
    )


def _is_tied(value: Any) -> bool:
    return isinstance(value, Sequence) and all(isinstance(names, Mapping) for names in value)


def _is_recompute(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("none", "full", "placed")
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_folder(value: Any) -> bool:
    return value is None or isinstance(value, str | PathLike)


def _is_float_type(value: Any) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value.is_floating_point)


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


_KINDS = (
    ("stages", _is_stages, "a dictionary from a stage's number to its nn.Module"),
    ("schedule", lambda value: isinstance(value, Schedule), "a fullbore Schedule"),
    ("loss_fn", _is_function, "a function or None"),
    ("count_fn", _is_function, "a function or None"),
    ("on_stall", _is_function, "a function or None"),
    ("clock", callable, "a function"),
    ("tied", _is_tied, "a list of dictionaries from a stage's number to a parameter's name"),
    ("reduction", lambda value: value in ("mean", "sum"), '"mean" or "sum"'),
    ("recompute", _is_recompute, '"none", "full", "placed" or a number of blocks'),
    ("main_grad_dtype", _is_float_type, "a floating-point torch.dtype or None"),
    ("reduce_dtype", _is_float_type, "a floating-point torch.dtype or None"),
    ("timeout_s", is_duration, f"a number of seconds above 0, at most {LONGEST_S}"),
    (
        "stall_timeout_s",
        lambda value: value is None or is_duration(value),
        f"a number of seconds above 0, at most {LONGEST_S}, or None",
    ),
    ("flight_record", _is_folder, "the path of a folder, or None"),
    ("offload_folder", _is_folder, "the path of a folder, or None"),
)


def _objection_to_device(device: Any) -> str | None:
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        return f"device is a torch.device or its name, not {_shown(device)}: {error}"
    if wanted.type not in ("cpu", "cuda"):
        return f"device is on cpu or cuda, not {_shown(device)}"
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        return f"device is {wanted}, and there are {torch.cuda.device_count()} CUDA devices here"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
