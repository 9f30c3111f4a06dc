"""Megatron's pipeline flags: their arithmetic, checked when flags are parsed, and their schedule.

People type these flags by heart, and Megatron itself finds out at the first step, or never, that
they do not fit together. Every refusal here comes before anything is launched and names the
nearest legal values. No torch is needed.

    P = pipeline-model-parallel-size        v = (layers / P) / num-layers-per-virtual-pipeline-stage
    M = global-batch-size / (micro-batch-size x data-parallel size)
    G = microbatch-group-size-per-virtual-pipeline-stage, by default P

Source: Megatron Core, `megatron/training/arguments.py` and `core/pipeline_parallel/schedules.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

from fullbore.errors import ConfigError
from fullbore.ir import Schedule
from fullbore.schedules import FAMILIES, build

__all__ = [
    "PipelineShape",
    "add_pipeline_optimization_args",
    "choose_schedule",
    "count_microbatches",
    "count_virtual_stages",
    "schedule_from_args",
    "shape_from_args",
    "split_layers",
]

_RANKS = "--pipeline-model-parallel-size"
_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_FIRST = "--decoder-first-pipeline-num-layers"
_LAST = "--decoder-last-pipeline-num-layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """What a set of pipeline flags means once its arithmetic has been checked.

    schedule: a name of `fullbore.schedules.FAMILIES`. ranks P, virtual_stages v, microbatches M.
    group_size: G, None where the schedule has none. slices: k, None for the schedule's own choice.
    layers: how many layers each of the S = P*v stages has, in the model's order; None where the
    number of layers was not given. made: a schedule that no name stands for.
    """

    schedule: str
    ranks: int
    virtual_stages: int
    microbatches: int
    group_size: int | None = None
    slices: int | None = None
    layers: tuple[int, ...] | None = None
    made: Schedule | None = None

    def build(self) -> Schedule:
        """The schedule itself, compute actions only; raises ScheduleError if it does not exist."""
        if self.made is not None:
            return self.made
        return build(
            self.schedule,
            ranks=self.ranks,
            microbatches=self.microbatches,
            virtual_stages=self.virtual_stages,
            microbatch_group_size=self.group_size,
            slices=self.slices,
        )


def add_pipeline_optimization_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add Megatron's pipeline flags to a parser, in a group "pipeline optimization".

    A flag that the parser has already is left as it is, so that this also works on a parser with
    flags of its own such as `--micro-batch-size`. Returns the parser.
    """
    group = parser.add_argument_group(title="pipeline optimization")
    for flag, default, text in (
        (_RANKS, 1, "P, ranks of the pipeline"),
        (_PER_CHUNK, None, "layers of one virtual stage; more than one virtual stage interleaves"),
        (_CHUNKS, None, "v, virtual stages a rank, instead of the layers of one"),
        (_GROUP, None, "G, microbatches that a virtual stage takes in a row, P by default"),
        (_FIRST, None, "layers of the first rank, where it is to have another number"),
        (_LAST, None, "layers of the last rank, where it is to have another number"),
        ("--micro-batch-size", None, "sequences of one microbatch"),
        ("--global-batch-size", None, "sequences of one step; by default one microbatch a replica"),
        ("--num-layers", None, "layers of the model"),
    ):
        _add(group, flag, type=int, default=default, metavar="N", help=text)
    _add(
        group,
        "--overlap-p2p-communication",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute while messages travel",
    )
    _add(
        group,
        "--schedule",
        choices=[family.name for family in FAMILIES],
        default=None,
        help="by default 1f1b, or interleaved where a rank has several virtual stages",
    )
    return parser


def _add(group: argparse._ArgumentGroup, flag: str, **options: object) -> None:
    try:
        group.add_argument(flag, **options)  # type: ignore[arg-type]
    except argparse.ArgumentError:
        return  # the parser has this flag: its own definition stands


def schedule_from_args(args: argparse.Namespace) -> Schedule:
    """The schedule that parsed flags ask for, compute actions only.

    Reads the flags of `add_pipeline_optimization_args` and, where they are there,
    `data_parallel_size` or else `world_size`. Raises ConfigError, or ScheduleError where the
    schedule itself refuses, naming the nearest legal values.
    """
    return shape_from_args(args).build()


def shape_from_args(args: argparse.Namespace) -> PipelineShape:
    """The checked arithmetic of parsed flags, as `schedule_from_args` reads them."""
    ranks = _at_least_one(_RANKS, _get(args, "pipeline_model_parallel_size") or 0)
    layers = _get(args, "num_layers")
    first = _get(args, "decoder_first_pipeline_num_layers")
    last = _get(args, "decoder_last_pipeline_num_layers")
    virtual_stages = count_virtual_stages(
        ranks=ranks,
        layers=layers,
        layers_per_stage=_get(args, "num_layers_per_virtual_pipeline_stage"),
        virtual_stages=_get(args, "num_virtual_stages_per_pipeline_rank"),
    )
    split = None
    if layers is not None:
        split = split_layers(
            layers=layers, ranks=ranks, virtual_stages=virtual_stages, first=first, last=last
        )
    microbatches = count_microbatches(
        global_batch_size=_get(args, "global_batch_size"),
        micro_batch_size=_get(args, "micro_batch_size"),
        data_parallel_size=_data_parallel_size(args, ranks),
    )
    return choose_schedule(
        name=getattr(args, "schedule", None),
        ranks=ranks,
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        group_size=_get(args, "microbatch_group_size_per_virtual_pipeline_stage"),
        layers=split,
    )


def choose_schedule(
    *,
    name: str | None,
    ranks: int,
    virtual_stages: int,
    microbatches: int,
    group_size: int | None,
    slices: int | None = None,
    layers: tuple[int, ...] | None = None,
) -> PipelineShape:
    """The shape of the schedule of this name, by default Megatron's: 1F1B, interleaved if v > 1.

    Raises ConfigError where the last group of an interleaved schedule is neither whole nor P
    microbatches long, as Megatron asks.
    """
    chosen = name or ("1f1b" if virtual_stages == 1 else "interleaved")
    if chosen == "interleaved":
        _check_group(ranks=ranks, microbatches=microbatches, group_size=group_size)
    return PipelineShape(
        schedule=chosen,
        ranks=ranks,
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        group_size=group_size,
        slices=slices,
        layers=layers,
    )


def count_microbatches(
    *, global_batch_size: int | None, micro_batch_size: int | None, data_parallel_size: int = 1
) -> int:
    """M, the microbatches of one step and replica; sizes count sequences.

    No global batch means one microbatch a replica, as in Megatron. Raises ConfigError where the
    global batch is no multiple of micro-batch-size x data-parallel size.
    """
    if micro_batch_size is None:
        raise ConfigError("--micro-batch-size is missing: say how many sequences a microbatch has")
    once = _at_least_one("--micro-batch-size", micro_batch_size)
    once *= _at_least_one("the data-parallel size", data_parallel_size)
    if global_batch_size is None:
        return 1
    if global_batch_size < 1 or global_batch_size % once:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} is no multiple of --micro-batch-size "
            f"{micro_batch_size} x data-parallel size {data_parallel_size} = {once}: the nearest "
            f"legal values are {_multiples(global_batch_size, once)}"
        )
    return global_batch_size // once


def count_virtual_stages(
    *, ranks: int, layers: int | None, layers_per_stage: int | None, virtual_stages: int | None
) -> int:
    """v, said directly or through the layers of one virtual stage (not both); 1 if neither is."""
    if layers_per_stage is not None and virtual_stages is not None:
        raise ConfigError(f"{_PER_CHUNK} and {_CHUNKS} say the same twice: give one of them")
    if virtual_stages is not None:
        return _at_least_one(_CHUNKS, virtual_stages)
    if layers_per_stage is None:
        return 1
    if layers is None:
        raise ConfigError(f"{_PER_CHUNK} needs --num-layers: say how many layers the model has")
    _check_divides_ranks(layers=layers, ranks=ranks)
    on_a_rank = layers // ranks
    if layers_per_stage < 1 or on_a_rank % layers_per_stage:
        raise ConfigError(
            f"{_PER_CHUNK} {layers_per_stage} does not divide the {on_a_rank} layers of a rank "
            f"({layers} layers / P={ranks}): the nearest legal values are "
            f"{_near(_divisors(on_a_rank), layers_per_stage)}"
        )
    return on_a_rank // layers_per_stage


def split_layers(
    *,
    layers: int,
    ranks: int,
    virtual_stages: int = 1,
    first: int | None = None,
    last: int | None = None,
) -> tuple[int, ...]:
    """Layers of each of the S = P*v stages, in the model's order; they sum up to `layers`.

    first, last: layers of the first and of the last rank, over all its virtual stages; the ranks
    between share the rest evenly, as in Megatron. Stage s stands on rank s mod P. Raises
    ConfigError naming the nearest legal values.
    """
    _at_least_one("--num-layers", layers)
    given = {flag: n for flag, n in ((_FIRST, first), (_LAST, last)) if n is not None}
    if not given:
        _check_divides_ranks(layers=layers, ranks=ranks)
    for flag, number in given.items():
        _check_own(flag, number, virtual_stages)
    per_rank = _layers_of_ranks(layers=layers, ranks=ranks, first=first, last=last)
    for number in per_rank:
        if number % virtual_stages:
            raise ConfigError(
                f"{_CHUNKS} {virtual_stages} does not divide the {number} layers of a rank: the "
                f"nearest legal values are {_near(_divisors(number), virtual_stages)}"
            )
    return tuple(number // virtual_stages for number in per_rank) * virtual_stages


def _layers_of_ranks(
    *, layers: int, ranks: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Layers of each rank [P], the first and last as told, the others evenly."""
    own = sum(number for number in (first, last) if number is not None)
    told = (first is not None) + (last is not None)
    others, rest = ranks - told, layers - own
    if others < 0 or (others == 0 and rest != 0):
        raise ConfigError(
            f"{_FIRST} and {_LAST} hold {own} of {layers} layers and leave {rest} for "
            f"{max(others, 0)} other ranks: let them sum up to {layers}, or use more ranks"
        )
    if others and (rest < others or rest % others):
        raise ConfigError(
            f"{rest} layers remain for {others} ranks beside {_FIRST} and {_LAST}, which does not "
            f"divide: nearest, the two flags hold {_remainders(layers, own, others)} together"
        )
    middle = (rest // others,) * others if others else ()
    head = () if first is None else (first,)
    return (*head, *middle, *(() if last is None else (last,)))


def _check_divides_ranks(*, layers: int, ranks: int) -> None:
    if layers % ranks or layers < ranks:
        raise ConfigError(
            f"{layers} layers do not divide over P={ranks} ranks: the nearest legal numbers of "
            f"layers are {_multiples(layers, ranks)}, of ranks {_near(_divisors(layers), ranks)}; "
            f"or give the first and last rank another number with {_FIRST} and {_LAST}"
        )


def _check_own(flag: str, number: int, virtual_stages: int) -> None:
    if number < 1 or number % virtual_stages:
        raise ConfigError(
            f"{flag} {number} does not divide over v={virtual_stages} virtual stages: the nearest "
            f"legal values are {_multiples(number, virtual_stages)}"
        )


def _check_group(*, ranks: int, microbatches: int, group_size: int | None) -> None:
    """Megatron's rules for G: from P to M, and the last group whole or at least P long."""
    group = ranks if group_size is None else group_size
    if group < ranks:
        raise ConfigError(
            f"{_GROUP} (G) is {group} and P is {ranks}: a group must fill the pipeline, so the "
            f"nearest legal value is {ranks}"
        )
    if group > microbatches >= ranks:
        raise ConfigError(
            f"{_GROUP} (G) is {group} and M is {microbatches}: a group is part of a step, so the "
            f"nearest legal value is {microbatches}"
        )
    rest = microbatches % group
    if 0 < rest < ranks:
        below, above = microbatches - rest, microbatches - rest + ranks
        legal = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"M={microbatches} microbatches in groups of G={group} leave a last group of {rest}, "
            f"less than P={ranks}: the nearest legal M is {legal} (M = --global-batch-size / "
            f"--micro-batch-size / data-parallel size), or choose --schedule 1f1b"
        )


def _data_parallel_size(args: argparse.Namespace, ranks: int) -> int:
    given = _get(args, "data_parallel_size")
    world = _get(args, "world_size")
    if given is not None or world is None:
        return 1 if given is None else given
    one_replica = ranks
    for name in ("tensor_model_parallel_size", "context_parallel_size"):
        one_replica *= _get(args, name) or 1
    if world % one_replica:
        raise ConfigError(
            f"a world of {world} ranks holds no whole number of replicas of {one_replica}: the "
            f"nearest legal values are {_multiples(world, one_replica)}"
        )
    return world // one_replica


def _get(args: argparse.Namespace, name: str) -> int | None:
    value = getattr(args, name, None)
    return None if value is None else int(value)


def _at_least_one(what: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{what} is {value}: the nearest legal value is 1")
    return value


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _remainders(layers: int, own: int, others: int) -> str:
    """The nearest numbers of layers for first and last rank that leave an even rest."""
    return _near([n for n in range(1, layers - others + 1) if (layers - n) % others == 0], own)


def _multiples(number: int, unit: int) -> str:
    """The nearest multiples of unit, such as "28 or 32"."""
    below = number // unit * unit
    return f"{below} or {below + unit}" if below >= unit else f"{unit}"


def _near(legal: Iterable[int], wanted: int) -> str:
    """The nearest legal values on either side, such as "2 or 4"."""
    values = sorted(legal)
    below = [n for n in values if n <= wanted][-1:]
    above = [n for n in values if n > wanted][:1]
    return " or ".join(map(str, below + above)) or "none"
