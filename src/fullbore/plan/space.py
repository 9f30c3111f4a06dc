"""Everything that may be tried: spreads of the devices, then schedules on each of them.

The order is fixed, so that a plan is the same each time. What cannot be is refused with the flag
that stands in the way and the values that would do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import isqrt

from fullbore.cost.model import Recompute
from fullbore.cost.model.legal import check, has_module
from fullbore.errors import ConfigError
from fullbore.plan.choice import NONE, Choice, Spread
from fullbore.plan.engines import check_choice, check_recompute, check_spread, refusal
from fullbore.plan.prices import layout_of
from fullbore.plan.programs import RUNNABLE, family_of, groups
from fullbore.plan.question import Question
from fullbore.schedules import Family

__all__ = [
    "can_recompute",
    "cheap_recomputes",
    "check_engines",
    "choices",
    "is_asked",
    "make_spread",
    "recomputes",
    "spreads",
    "virtual_stages",
]

_MOST_MICROBATCHES = 100_000  # a schedule of more is neither asked for nor quickly simulated
_MOST_MICROBATCH_SIZE = 16
_MOST_VIRTUAL_STAGES = 8


def spreads(question: Question) -> list[Spread]:
    """All legal spreads over all devices.

    Raises ConfigError where there is none: it names the flag that rules the others out.
    """
    found, refused = [], []
    for tensor in _tensors(question):
        for context in question.fixed.context:
            for pipeline in _pipelines(question, tensor * context):
                for expert in question.fixed.expert:
                    for size in _sizes(question, tensor * context * pipeline):
                        try:
                            found.append(
                                make_spread(
                                    question,
                                    pipeline=pipeline,
                                    tensor=tensor,
                                    context=context,
                                    expert=expert,
                                    microbatch_size=size,
                                )
                            )
                        except ConfigError as error:
                            refused.append(error)
    if not found:
        raise refused[0] if refused else _no_spread(question)
    return found


def make_spread(
    question: Question,
    *,
    pipeline: int,
    tensor: int,
    context: int,
    expert: int,
    microbatch_size: int,
) -> Spread:
    """One spread; ConfigError that says why it cannot be, and what would do."""
    devices, fixed = question.cluster.size, question.fixed
    _check_tensor(question, tensor)
    _check_pipeline(question, pipeline)
    one = pipeline * tensor * context
    _check_stage(question, tensor=tensor, context=context)
    if devices % one:
        legal = _divisors(devices // (tensor * context))
        raise ConfigError(
            f"--pipeline-model-parallel-size {pipeline} x {_cut(tensor, context)} does not divide "
            f"the {devices} devices of {question.cluster.name}: with these use "
            f"P = {_near(legal, pipeline)}"
        )
    data = devices // one
    _check_batch(question, data=data, size=microbatch_size)
    spread = Spread(
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        expert=expert,
        data=data,
        microbatch_size=microbatch_size,
        microbatches=question.global_batch // (data * microbatch_size),
        sequence_parallel=tensor > 1 and fixed.sequence_parallel is not False,
        distributed=_is_distributed(question, data * context),
        expert_tensor=fixed.expert_tensor,
    )
    layout_of(question, spread)
    for engine in fixed.engines:
        check_spread(engine, question, spread)
    check(
        question.shape,
        spread.split,
        sequence=question.sequence,
        microbatch=microbatch_size,
        recompute=(fixed.recompute or (NONE,))[0],
    )
    return spread


def choices(question: Question, spread: Spread) -> Iterator[Choice]:
    """Every schedule that the engine runs on a spread, with its numbers; nothing recomputed."""
    fixed = question.fixed
    names = fixed.schedules or tuple(family.name for family in RUNNABLE)
    for family in map(family_of, names):
        for v in _virtual_stages(question, family, spread.pipeline):
            tried = groups(family, ranks=spread.pipeline, microbatches=spread.microbatches)
            if fixed.group is not None:
                tried = fixed.group if family.takes_group else (None,)
            for group in tried:
                choice = Choice(
                    spread=spread,
                    schedule=family.name,
                    virtual_stages=v,
                    group=group,
                    layers=fixed.layers,
                )
                if _runs(question, choice):
                    yield choice


def is_asked(question: Question, choice: Choice) -> bool:
    """Whether a choice is among those that the fixed flags leave."""
    fixed, spread = question.fixed, choice.spread
    pairs: tuple[tuple[object, tuple[object, ...] | None], ...] = (
        (spread.pipeline, fixed.pipeline),
        (spread.tensor, fixed.tensor),
        (spread.context, fixed.context),
        (spread.expert, fixed.expert),
        (spread.microbatch_size, fixed.microbatch_size),
        (choice.virtual_stages, fixed.virtual_stages),
        (choice.group, None if choice.group is None else fixed.group),
        (choice.schedule, fixed.schedules),
        (spread.distributed, None if fixed.distributed is None else (fixed.distributed,)),
        (
            spread.sequence_parallel,
            None
            if fixed.sequence_parallel is None or spread.tensor == 1
            else (fixed.sequence_parallel,),
        ),
        (choice.recompute, fixed.recompute),
        (choice.layers, None if fixed.layers is None else (fixed.layers,)),
    )
    if refusal(question, choice) is not None:
        return False
    return all(allowed is None or value in allowed for value, allowed in pairs)


def recomputes(question: Question) -> tuple[Recompute, ...]:
    """What may be computed again: what was asked for, else each granularity; as far as all engines
    that are asked for can. ConfigError where none of it is left.
    """
    tried = question.fixed.recompute
    if tried is None:
        tried = NONE, Recompute(granularity="selective"), Recompute(granularity="full")
    left = [one for one in tried if can_recompute(question, one)]
    if not left:
        for engine in question.fixed.engines:
            for one in tried:
                check_recompute(engine, one)
    return tuple(left)


def cheap_recomputes(question: Question) -> tuple[Recompute, ...]:
    """Modules whose outputs alone are let go, which costs little: the norms, and all that there
    are; as far as all engines that are asked for can.
    """
    more = [name for name in ("mla_up_proj", "moe_act") if has_module(question.shape, name)]
    made = [Recompute().changed("selective", modules=("layernorm", *m)) for m in ((), more)]
    return tuple(one for one in dict.fromkeys(made) if can_recompute(question, one))


def can_recompute(question: Question, recompute: Recompute) -> bool:
    """Whether all engines that are asked for can compute so much again."""
    try:
        for engine in question.fixed.engines:
            check_recompute(engine, recompute)
    except ConfigError:
        return False
    return True


def check_engines(question: Question) -> None:
    """Raise ConfigError where the engines that are asked for run nothing of what is left to try."""
    if not question.fixed.engines:
        return
    recomputes(question)
    reason = None
    free = replace(question, fixed=replace(question.fixed, engines=()))
    for spread in spreads(question):
        for choice in choices(free, spread):
            reason = refusal(question, choice)
            if reason is None:
                return
    if reason is not None:
        raise ConfigError(reason)


def _runs(question: Question, choice: Choice) -> bool:
    """Whether all engines that are asked for have the schedule, and take its numbers."""
    try:
        for engine in question.fixed.engines:
            check_choice(engine, choice)
    except ConfigError:
        return False
    return True


def virtual_stages(question: Question, ranks: int) -> tuple[int, ...]:
    """Numbers of stages a rank worth trying: powers of two, and what divides a rank's layers."""
    layers = len(question.shape.layers)
    most = min(_MOST_VIRTUAL_STAGES, layers // ranks)
    whole = _divisors(layers // ranks) if layers % ranks == 0 else []
    return tuple(sorted({v for v in (1, 2, 4, 8, *whole) if v <= most}))


def _virtual_stages(question: Question, family: Family, ranks: int) -> Iterable[int]:
    """v of a family; one stage a rank under several names would be one schedule many times."""
    fixed, layers = question.fixed, len(question.shape.layers)
    if ranks == 1 and family.name not in ("1f1b", "gpipe"):
        return ()
    if family.takes_virtual_stages:
        tried: Iterable[int] = fixed.virtual_stages or virtual_stages(question, ranks)
        if family.name == "hanayo":  # waves go down and up; long ones take long to build
            tried = [v for v in tried if v % 2 == 0 and (v == 2 or fixed.virtual_stages)]
        return [v for v in tried if v > 1 and v * ranks <= layers]
    own = family.default_virtual_stages
    if fixed.virtual_stages is not None and own not in fixed.virtual_stages:
        return ()
    return [own] if own * ranks <= layers else []


def _tensors(question: Question) -> Iterable[int]:
    if question.fixed.tensor is not None:
        return question.fixed.tensor
    node = min(question.cluster.device.gpus_per_node, question.cluster.size)
    heads = question.shape.layers[0].attention.heads
    return [t for t in _divisors(node) if heads % t == 0]


def _pipelines(question: Question, one: int) -> Iterable[int]:
    if question.fixed.pipeline is not None:
        return question.fixed.pipeline
    devices, layers = question.cluster.size, len(question.shape.layers)
    if devices % one:
        return [1]  # refused, with the reason
    return [p for p in _divisors(devices // one) if p <= layers]


def _sizes(question: Question, one: int) -> Iterable[int]:
    """Sequences a microbatch: all that divide the replica's batch, up to a limit."""
    if question.fixed.microbatch_size is not None:
        return question.fixed.microbatch_size
    devices, batch = question.cluster.size, question.global_batch
    data = devices // one if devices % one == 0 else 1
    if batch % data:
        return [1]  # refused, with the reason
    return [b for b in _divisors(batch // data) if b <= _MOST_MICROBATCH_SIZE]


def _check_tensor(question: Question, tensor: int) -> None:
    node = question.cluster.device.gpus_per_node
    if tensor < 1:
        raise ConfigError(f"--tensor-model-parallel-size {tensor}: it must be 1 or more")
    if tensor > node and question.cluster.nodes > 1:
        raise ConfigError(
            f"--tensor-model-parallel-size {tensor} is more than the {node} devices of a node: "
            f"use {node} or less"
        )


def _check_stage(question: Question, *, tensor: int, context: int) -> None:
    """Whether the devices can be shared out among stages of T·C each."""
    devices = question.cluster.size
    if devices % (tensor * context) == 0:
        return
    if devices % tensor == 0:
        use = f"C = {_near(_divisors(devices // tensor), context)}"
    else:
        use = f"T = {_near(_divisors(devices), tensor)}"
    raise ConfigError(
        f"{_cut(tensor, context)} does not divide the {devices} devices of "
        f"{question.cluster.name}: use {use}"
    )


def _cut(tensor: int, context: int) -> str:
    """What cuts a layer, as typed."""
    told = f"--tensor-model-parallel-size {tensor}"
    return told if context == 1 else f"{told} x --context-parallel-size {context}"


def _check_pipeline(question: Question, pipeline: int) -> None:
    layers = len(question.shape.layers)
    if pipeline < 1:
        raise ConfigError(f"--pipeline-model-parallel-size {pipeline}: it must be 1 or more")
    if pipeline > layers:
        raise ConfigError(
            f"--pipeline-model-parallel-size {pipeline} is more than the model's {layers} layers: "
            f"use {layers} or less"
        )


def _check_batch(question: Question, *, data: int, size: int) -> None:
    batch = question.global_batch
    if size < 1:
        raise ConfigError(f"--micro-batch-size {size}: it must be 1 or more")
    once = data * size
    if batch % once:
        below = batch // once * once
        nearest = f"{below} or {below + once}" if below else f"{once}"
        raise ConfigError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {size} x "
            f"{data} replicas = {once}: use {nearest}, or more devices a replica"
        )
    if batch // once > _MOST_MICROBATCHES:
        raise ConfigError(
            f"--global-batch-size {batch} is {batch // once} microbatches of {size} on each of "
            f"{data} replicas: use at most {_MOST_MICROBATCHES * once}"
        )


def _is_distributed(question: Question, replicas: int) -> bool:
    asked = question.fixed.distributed
    return replicas > 1 if asked is None else asked


def _no_spread(question: Question) -> ConfigError:
    return ConfigError(
        f"no split of {question.cluster.size} devices fits: leave out one of the parallel sizes"
    )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def _near(legal: Iterable[int], wanted: int) -> str:
    values = sorted(legal)
    below = [n for n in values if n < wanted][-1:]
    above = [n for n in values if n > wanted][:1]
    return " or ".join(map(str, below + above)) or "1"
