"""From what was typed for `fullbore plan` to a question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fullbore.cli.model_inputs import modules_of, usual_length
from fullbore.cli.plan_asked import ANY, Asked
from fullbore.cli.plan_script import Said, said_by
from fullbore.cost.hardware import Capture, Cluster, Overlap
from fullbore.cost.model import Kernels, ModelShape, Precision, Recompute
from fullbore.cost.model.config import read_config
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.megatron import shape_of_flags
from fullbore.cost.model.script import read_flags
from fullbore.cost.model.split import dispatcher_named
from fullbore.errors import ConfigError
from fullbore.plan import Fixed, Question
from fullbore.plan.explain import Job
from fullbore.plan.programs import family_of
from fullbore.plan.question import Borrowed
from fullbore.search import MemoryLimit

__all__ = ["blamed", "make_question", "memory_limit"]


def make_question(asked: Asked) -> Question:
    """Check what was typed. Raises ModelError or ConfigError naming the flag or the field.

    What Megatron's arguments say besides the model holds where nothing was typed.
    """
    if asked.model is None or asked.cluster is None:
        raise _missing(asked)
    cluster, path = Cluster.parse(asked.cluster), Path(asked.model)
    if path.suffix.lower() not in (".sh", ".yaml", ".yml"):
        said = Said(
            asked=asked,
            borrowed=Borrowed(),
            precision=Precision.named(asked.precision or "bf16"),
        )
        return _question(said, cluster, _shape(path))
    flags = read_flags(asked.model)
    shape = replace(shape_of_flags(flags), name=path.stem)
    said = said_by(Job(flags=flags, cluster=cluster), asked)
    try:
        return _question(said, cluster, shape)
    except ConfigError as error:
        raise blamed(error, said.borrowed, shape.name) from error


def _missing(asked: Asked) -> ConfigError:
    missing = {
        "--model": asked.model,
        "--cluster": asked.cluster,
        "--global-batch-size": asked.global_batch,
    }
    named = " and ".join(flag for flag, value in missing.items() if value is None)
    return ConfigError(f"give {named} too, or --preset 64gpu-80layer")


def blamed(error: ConfigError, borrowed: Borrowed, model: str) -> ConfigError:
    """The error, saying which of the flags that it names nobody typed."""
    told = [flag for flag in borrowed.taken if flag.partition(" ")[0] in str(error).split()]
    if not told:
        return error
    return ConfigError(
        f"{error} ({', '.join(told)}: from the arguments of {model}; type another value, or "
        f"{ANY} to leave a size open)"
    )


def _question(said: Said, cluster: Cluster, shape: ModelShape) -> Question:
    asked = said.asked
    if asked.global_batch is None:
        raise _missing(asked)
    return Question(
        shape=shape,
        cluster=cluster,
        global_batch=asked.global_batch,
        sequence=usual_length(shape) if asked.sequence is None else asked.sequence,
        precision=said.precision,
        kernels=Kernels(
            flash=asked.flash is not False,
            dispatcher=dispatcher_named(asked.dispatcher or "alltoall"),
            dropless=said.dropless,
        ),
        fixed=_fixed(asked, len(shape.layers)),
        overlap=Overlap(forward=bool(asked.overlap_tensor), expert=bool(asked.overlap_experts)),
        capture=Capture.parse(asked.graphs or "none", asked.graph_modules),
        memory_limit_bytes=memory_limit(asked.memory_limit),
        overlap_messages=asked.overlap_messages is not False,
        overlap_gradients=asked.overlap_gradients is not False,
        overlap_parameters=asked.overlap_parameters is not False,
        optimizer=said.optimizer,
        causal=asked.causal,
        borrowed=said.borrowed,
    )


def _shape(path: Path) -> ModelShape:
    """The model that a configuration describes, under the name of its folder or file."""
    shape = shape_of(read_config(path))
    is_named = path.is_dir() or path.name != "config.json"
    return replace(
        shape,
        name=path.resolve().name.removesuffix(".json") if is_named else path.resolve().parent.name,
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
    if text in (None, ANY):
        return None
    assert text is not None
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} {text}: write a number, or several such as 4,8") from None
    if min(numbers) < 1:
        raise ConfigError(f"{flag} {text}: it must be 1 or more")
    return numbers


def _layers(text: str | None, layers: int) -> tuple[int, ...] | None:
    if text in (None, ANY):
        return None
    assert text is not None
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
    modules = modules_of(asked.recompute_modules)
    if what == ANY or (what is None and modules is None):
        if number is not None:
            raise ConfigError("--recompute-num-layers needs --recompute-granularity full")
        return None
    if number is not None and (what != "full" or number < 1):
        raise ConfigError(
            f"--recompute-num-layers {number}: give 1 or more, with --recompute-granularity full"
        )
    return (Recompute().changed(what, layers=number, modules=modules),)


def memory_limit(text: str | None) -> float | None:
    """What a device may hold, bytes; None where nothing was typed. Raises ConfigError."""
    if text is None:
        return None
    refused = ConfigError(f"--memory-limit {text[:60]}: write bytes, such as 70GB or 72GiB")
    try:
        limit = MemoryLimit.parse(text)
    except ConfigError:
        raise refused from None
    if limit.unit != "bytes" or len(limit.amounts) > 1:
        raise refused
    return limit.amounts[0]
