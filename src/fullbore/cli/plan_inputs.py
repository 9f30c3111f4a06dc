"""From what was typed for `fullbore plan` to a question."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from fullbore.cost.hardware import Capture, Cluster, Overlap
from fullbore.cost.model import Kernels, ModelShape, Precision, Recompute
from fullbore.cost.model.config import read_config
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.megatron import shape_of_flags
from fullbore.cost.model.script import read_flags
from fullbore.cost.model.split import dispatcher_named
from fullbore.errors import ConfigError
from fullbore.plan import Fixed, Question
from fullbore.plan.engines import Engine
from fullbore.plan.programs import family_of
from fullbore.search import MemoryLimit

__all__ = ["Asked", "make_question", "memory_limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed; None where it was not."""

    model: str | None
    cluster: str | None
    global_batch: int | None
    sequence: int
    memory_limit: str | None
    pipeline: str | None
    tensor: str | None
    context: str | None
    expert: str | None
    expert_tensor: int | None
    microbatch_size: str | None
    virtual_stages: str | None
    group: str | None
    schedule: str | None
    layers: str | None
    recompute: str | None
    recompute_layers: int | None
    sequence_parallel: bool | None
    distributed: bool | None
    precision: str
    flash: bool
    causal: bool
    overlap_messages: bool
    overlap_gradients: bool
    overlap_tensor: bool
    overlap_experts: bool
    dispatcher: str
    graphs: tuple[str, str | None]
    engines: tuple[Engine, ...]


def make_question(asked: Asked) -> Question:
    """Check what was typed. Raises ModelError or ConfigError naming the flag or the field."""
    if asked.model is None or asked.cluster is None or asked.global_batch is None:
        missing = {
            "--model": asked.model,
            "--cluster": asked.cluster,
            "--global-batch-size": asked.global_batch,
        }
        named = " and ".join(flag for flag, value in missing.items() if value is None)
        raise ConfigError(f"give {named} too, or --preset 64gpu-80layer")
    shape = _shape(asked.model)
    _check_positions(shape, asked.sequence)
    return Question(
        shape=shape,
        cluster=Cluster.parse(asked.cluster),
        global_batch=asked.global_batch,
        sequence=asked.sequence,
        precision=Precision.named(asked.precision),
        kernels=Kernels(flash=asked.flash, dispatcher=dispatcher_named(asked.dispatcher)),
        fixed=_fixed(asked, len(shape.layers)),
        overlap=Overlap(forward=asked.overlap_tensor, expert=asked.overlap_experts),
        capture=Capture.parse(*asked.graphs),
        memory_limit_bytes=memory_limit(asked.memory_limit),
        overlap_messages=asked.overlap_messages,
        overlap_gradients=asked.overlap_gradients,
        causal=asked.causal,
    )


def _shape(model: str) -> ModelShape:
    """The model that a file describes, under the name of its folder or file."""
    path = Path(model)
    if path.suffix.lower() in (".sh", ".yaml", ".yml"):
        return replace(shape_of_flags(read_flags(model)), name=path.stem)
    shape = shape_of(read_config(path))
    is_named = path.is_dir() or path.name != "config.json"
    return replace(
        shape,
        name=path.resolve().name.removesuffix(".json") if is_named else path.resolve().parent.name,
    )


def _check_positions(shape: ModelShape, sequence: int) -> None:
    if shape.positions and sequence > shape.positions:
        raise ConfigError(
            f"--seq-length {sequence}: this model has learned {shape.positions} positions; use at "
            f"most {shape.positions}"
        )


def _fixed(asked: Asked, layers: int) -> Fixed:
    names = None if asked.schedule is None else tuple(asked.schedule.split(","))
    families = [family_of(name) for name in names or ()]
    if asked.group is not None and families and not any(f.takes_group for f in families):
        raise ConfigError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {asked.group}: "
            f"{' and '.join(names or ())} have no groups; leave it out"
        )
    return Fixed(
        pipeline=_numbers("--pipeline-model-parallel-size", asked.pipeline),
        tensor=_numbers("--tensor-model-parallel-size", asked.tensor),
        context=_numbers("--context-parallel-size", asked.context) or (1,),
        expert=_numbers("--expert-model-parallel-size", asked.expert) or (1,),
        expert_tensor=asked.expert_tensor,
        microbatch_size=_numbers("--micro-batch-size", asked.microbatch_size),
        virtual_stages=_numbers("--num-virtual-stages-per-pipeline-rank", asked.virtual_stages),
        group=_numbers("--microbatch-group-size-per-virtual-pipeline-stage", asked.group),
        schedules=names,
        recompute=_recompute(asked),
        layers=_layers(asked.layers, layers),
        engines=asked.engines,
        sequence_parallel=asked.sequence_parallel,
        distributed=asked.distributed,
    )


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} {text}: write a number, or several such as 4,8") from None
    if min(numbers) < 1:
        raise ConfigError(f"{flag} {text}: it must be 1 or more")
    return numbers


def _layers(text: str | None, layers: int) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--stage-layers {text}: write numbers such as 8,8,8,7") from None
    if sum(numbers) != layers or min(numbers[:-1], default=1) < 1 or numbers[-1] < 0:
        raise ConfigError(
            f"--stage-layers {text} are {sum(numbers)} layers; the model has {layers}: give every "
            "stage one or more (the last may have none, with the head alone) that add up to it"
        )
    return numbers


def _recompute(asked: Asked) -> tuple[Recompute, ...] | None:
    what, number = asked.recompute, asked.recompute_layers
    if what is None:
        if number is not None:
            raise ConfigError("--recompute-num-layers needs --recompute-granularity full")
        return None
    if what not in ("none", "selective", "full"):
        raise ConfigError(f"--recompute-granularity {what}: it must be none, selective or full")
    if number is not None and (what != "full" or number < 1):
        raise ConfigError(
            f"--recompute-num-layers {number}: give 1 or more, with --recompute-granularity full"
        )
    granularity = cast(Literal["none", "selective", "full"], what)
    return (Recompute(granularity=granularity, layers=number),)


def memory_limit(text: str | None) -> float | None:
    """What a device may hold, bytes; None where nothing was typed. Raises ConfigError."""
    if text is None:
        return None
    limit = MemoryLimit.parse(text)
    if limit.unit != "bytes":
        raise ConfigError(f"--memory-limit {text}: write bytes, such as 70GB or 72GiB")
    return limit.amount
