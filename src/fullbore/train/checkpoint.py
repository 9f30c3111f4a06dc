"""Checkpoints: whole or not there, readable by any number of ranks, and never lost to a failure.

A checkpoint is written by all ranks into a folder beside its place, which is renamed when it is
complete; `latest` is pointed to it last. A full disk or a killed rank therefore leaves the one
before as it was. Tensors go by the whole model's names, so another cut can read them.

    SAVE/latest                 the name of the newest complete checkpoint
    SAVE/iter_0000100/          .metadata and __R_0.distcp, by torch.distributed.checkpoint
    SAVE/iter_0000100/run.json  step, sequences seen, ranks, dtype, what decides the steps
    SAVE/iter_0000100/model/    configuration and tokenizer

Ranks on several machines need one folder that all of them see.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from fullbore.errors import CheckpointError
from fullbore.files import replace_file
from fullbore.train.checked import CheckedReader
from fullbore.train.team import Team

__all__ = [
    "Progress",
    "find_checkpoint",
    "has_checkpoints",
    "model_folder_of",
    "read_progress",
    "read_state",
    "save",
    "tensor_names",
]

_LATEST = "latest"
_RUN = "run.json"
_MODEL = "model"
_MODEL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come.

    step: how many are done. ranks: all of the run, in `replicas` replicas. dtype: of the weights
    in training. course: what decides the run's steps, as `course_of` has it; empty where a release
    wrote it that did not keep that.
    """

    step: int
    sequences: int
    ranks: int
    dtype: str
    replicas: int = 1
    course: Mapping[str, Any] = field(default_factory=dict)


def save(
    state: Mapping[str, Tensor], progress: Progress, *, folder: Path, model_folder: Path, team: Team
) -> Path:
    """Write a checkpoint; every rank calls, each with its own tensors. Returns its folder.

    folder: of all checkpoints of the run. model_folder: whose configuration and tokenizer go
    along. Raises CheckpointError on every rank, with the checkpoints before it untouched.
    """
    name = f"iter_{progress.step:07d}"
    temporary, target = folder / f".{name}.writing", folder / name
    steps = (
        (lambda: _begin(temporary, model_folder), True),
        (lambda: _write(state, temporary, team), False),
        (lambda: _finish(temporary, target, progress), True),
    )
    try:
        for step, lead_only in steps:
            if lead_only and not team.leads:
                step = _nothing
            team.together(step, wrong=CheckpointError)
    except CheckpointError as error:
        free = _free_space(folder)
        if team.leads:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint of step {progress.step} could not be written to {folder}: {error}; "
            f"{free}{_what_is_left(folder)}"
        ) from error
    return target


def _free_space(folder: Path) -> str:
    """What writers of tensors do not say when a disk is full."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return ""
    return f"the disk has {disk.free / 1e6:.1f} MB of {disk.total / 1e6:.1f} MB left; "


def find_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of a run, or the folder itself if it is a checkpoint.

    Raises CheckpointError where there is none.
    """
    if (folder / _RUN).is_file():
        return folder
    try:
        name = (folder / _LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: give the folder that --save had, or one of its "
            "iter_... folders"
        ) from None
    before = _set_aside(folder, name)
    if not (folder / name).exists() and (before / _RUN).is_file():
        return before  # a run ended between two renamings
    if not (folder / name / _RUN).is_file():
        raise CheckpointError(f"{folder / _LATEST} names {name!r}, which is no checkpoint")
    return folder / name


def has_checkpoints(folder: Path) -> bool:
    """Whether a run has left checkpoints in this folder."""
    return (folder / _LATEST).exists()


def read_progress(checkpoint: Path) -> Progress:
    """How far the run had come; CheckpointError where that cannot be read."""
    try:
        progress = Progress(**json.loads((checkpoint / _RUN).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {checkpoint / _RUN}: {error}") from error
    numbers = (progress.step, progress.sequences, progress.ranks, progress.replicas)
    if not (
        all(type(number) is int and number >= 0 for number in numbers)
        and isinstance(getattr(torch, str(progress.dtype), None), torch.dtype)
        and isinstance(progress.course, Mapping)
    ):
        raise CheckpointError(f"cannot read {checkpoint / _RUN}: it is not as it was written")
    return progress


def model_folder_of(checkpoint: Path) -> Path:
    """The folder with the model's configuration and tokenizer inside a checkpoint."""
    return checkpoint / _MODEL


def tensor_names(checkpoint: Path) -> set[str]:
    """The names of all tensors in a checkpoint."""
    try:
        return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
    except Exception as error:  # it is unpickled, so a broken file may raise anything
        raise CheckpointError(f"cannot read {checkpoint / '.metadata'}: {error}") from error


def read_state(state: dict[str, Tensor], *, checkpoint: Path, group: Any = None) -> None:
    """Fill tensors from a checkpoint, by name; each rank reads its own and nothing else.

    Every rank of `group` calls; without one this process reads alone. Raises CheckpointError.
    """
    missing = sorted(set(state) - tensor_names(checkpoint))
    if missing:
        raise CheckpointError(
            f"{checkpoint} lacks {len(missing)} tensors, such as {missing[0]!r}: it is of another "
            "model"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_loader.load(
                state,
                storage_reader=CheckedReader(checkpoint),
                process_group=group,
                no_dist=group is None,
            )
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"cannot read the checkpoint {checkpoint}: {_root(error)}") from error


def _nothing() -> None:
    pass


def _begin(temporary: Path, model_folder: Path) -> None:
    """A clean folder, with what a later export needs beside the weights."""
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / _MODEL).mkdir(parents=True)
    for pattern in _MODEL_FILES:
        for path in model_folder.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, temporary / _MODEL)


def _write(state: Mapping[str, Tensor], temporary: Path, team: Team) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state_dict_saver.save(
                dict(state),
                storage_writer=FileSystemWriter(temporary),
                process_group=team.group,
                no_dist=team.group is None,
            )
    except CheckpointException as error:  # not an Exception in every release of torch
        raise CheckpointError(_root(error)) from error


def _finish(temporary: Path, target: Path, progress: Progress) -> None:
    """Everything is written: put it in its place, then point to it."""
    (temporary / _RUN).write_text(json.dumps(asdict(progress)), encoding="utf-8")
    old = _set_aside(target.parent, target.name)
    if target.exists():  # the same step again, after a resume
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.rename(temporary, target)
    replace_file(target.parent / _LATEST, target.name.encode())
    shutil.rmtree(old, ignore_errors=True)


def _set_aside(folder: Path, name: str) -> Path:
    """Where a checkpoint is while another one of the same step is put in its place."""
    return folder / f".{name}.old"


def _root(error: BaseException) -> str:
    """What went wrong at the bottom, on one line; torch lists one error a rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _what_is_left(folder: Path) -> str:
    try:
        return f"the checkpoint before it, {find_checkpoint(folder)}, is whole"
    except CheckpointError:
        return "there is none before it"
