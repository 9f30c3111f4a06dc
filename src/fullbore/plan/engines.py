"""Who may carry a plan out, and what each of them can do.

A plan that is made for an engine keeps to what that engine runs. What it cannot do is refused by
name, with the flag of `fullbore plan` that would do. One row an engine; sources:

    fullbore     docs/engine.md; its flags are Megatron's
    megatron     Megatron Core, megatron/training/arguments.py, core/pipeline_parallel/schedules.py
    deepspeed    DeepSpeed 0.19, runtime/pipe: one schedule, ZeRO up to stage 1
    torchtitan   torchtitan 0.2.2 (the last release that is configured by TOML files),
                 config/job_config.py and distributed/pipeline_parallel.py; its pipeline is
                 torch.distributed.pipelining, which runs any order from a CSV file
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullbore.cost.model import Recompute
from fullbore.errors import ConfigError
from fullbore.megatron import choose_schedule
from fullbore.plan.choice import Choice, Spread
from fullbore.plan.engine_states import adam_in_32_bits, adam_or_sgd_in_32_bits, any_optimizer
from fullbore.schedules import FAMILIES

if TYPE_CHECKING:
    from fullbore.plan.question import Question

__all__ = [
    "ENGINES",
    "Engine",
    "check",
    "check_choice",
    "check_recompute",
    "check_spread",
    "engine_of",
    "refusal",
]

# How each size is told of where an engine has none of it.
_SIZES = {
    "tensor": ("--tensor-model-parallel-size", "cuts no layer's width"),
    "context": ("--context-parallel-size", "cuts no sequence"),
    "expert": ("--expert-model-parallel-size", "spreads no experts"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One that trains.

    name: as on the command line. title: as its makers call it. schedules: those that it runs, by
    our names. from_file: whether it also runs what a search found, from a file. sizes: which of
    tensor, context and expert parallelism it has. precisions: by name. recompute: of none,
    selective, full and some (the first N layers of each stage). numbers, spreads: what else it
    asks of a schedule's numbers, and of a spread; states: of the optimizer, given the title too.
    They raise ConfigError.
    """

    name: str
    title: str
    schedules: tuple[str, ...]
    from_file: bool
    sizes: tuple[str, ...]
    precisions: tuple[str, ...]
    recompute: tuple[str, ...]
    numbers: Callable[[Choice], None]
    spreads: Callable[[Question, Spread], None]
    states: Callable[[str, Question], None]


def engine_of(name: str) -> Engine:
    """The engine of this name; ConfigError where there is none."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise ConfigError(f"no engine is called {name!r}: {', '.join(e.name for e in ENGINES)}")


def check(engine: Engine, question: Question, choice: Choice) -> None:
    """Raise ConfigError unless the engine can carry a choice out."""
    check_spread(engine, question, choice.spread)
    check_choice(engine, choice)


def refusal(question: Question, choice: Choice) -> str | None:
    """Why an engine that the question asks for cannot carry a choice out; None where all can."""
    try:
        for engine in question.fixed.engines:
            check(engine, question, choice)
    except ConfigError as error:
        return str(error)
    return None


def check_spread(engine: Engine, question: Question, spread: Spread) -> None:
    """Raise ConfigError unless the engine knows precision, optimizer and the sizes of a spread."""
    if question.precision.name not in engine.precisions:
        raise ConfigError(
            f"{engine.title} does not train in {question.precision.name}: plan with --precision "
            f"{' or '.join(engine.precisions)}"
        )
    engine.states(engine.title, question)
    for name, (flag, what) in _SIZES.items():
        size = getattr(spread, name)
        if size > 1 and name not in engine.sizes:
            raise ConfigError(f"{flag} {size}: {engine.title} {what}; plan with {flag} 1")
    if spread.expert_tensor not in (None, spread.tensor) and "expert" not in engine.sizes:
        raise ConfigError(
            f"--expert-tensor-parallel-size {spread.expert_tensor}: {engine.title} spreads no "
            "experts; leave it out"
        )
    engine.spreads(question, spread)


def check_choice(engine: Engine, choice: Choice) -> None:
    """Raise ConfigError unless the engine runs the schedule with its numbers and recomputation."""
    is_named = any(family.name == choice.schedule for family in FAMILIES)
    if choice.schedule not in engine.schedules if is_named else not engine.from_file:
        what = choice.schedule if is_named else "from a file"
        raise ConfigError(
            f"{engine.title} has no schedule {what}: plan with --schedule "
            f"{','.join(engine.schedules)}"
        )
    engine.numbers(choice)
    check_recompute(engine, choice.recompute)


def check_recompute(engine: Engine, recompute: Recompute) -> None:
    """Raise ConfigError unless the engine can compute so much again."""
    kind = "some" if recompute.layers is not None else recompute.granularity
    if kind in engine.recompute:
        return
    if kind == "some":
        raise ConfigError(
            f"--recompute-num-layers {recompute.layers}: {engine.title} computes all layers again "
            "or none; plan with --recompute-granularity full, or none"
        )
    known = " or ".join(name for name in engine.recompute if name != "some")
    raise ConfigError(
        f"--recompute-granularity {kind}: {engine.title} has nothing like it; plan with "
        f"--recompute-granularity {known}"
    )


# -- what else each of them asks ------------------------------------------------------------------


def _nothing_of_numbers(choice: Choice) -> None:
    """Any numbers that the schedule itself takes."""


def _nothing_of_spreads(question: Question, spread: Spread) -> None:
    """Any spread of the sizes that the engine has."""


def _megatron_numbers(choice: Choice) -> None:
    """Groups of an interleaved schedule as Megatron takes them; Fullbore's flags follow it."""
    choose_schedule(
        name=choice.schedule,
        ranks=choice.spread.pipeline,
        virtual_stages=choice.virtual_stages,
        microbatches=choice.spread.microbatches,
        group_size=choice.group,
    )


def _torchtitan_numbers(choice: Choice) -> None:
    """Stages go to ranks in turn, or down and up again in a V."""
    if choice.schedule == "hanayo" and choice.virtual_stages > 2:
        raise ConfigError(
            f"hanayo with --num-virtual-stages-per-pipeline-rank {choice.virtual_stages}: "
            "torchtitan places stages in turn or in one V; plan with 2"
        )


def _torchtitan_spreads(question: Question, spread: Spread) -> None:
    if spread.tensor > 1 and not spread.sequence_parallel:
        raise ConfigError(
            f"--no-sequence-parallel: torchtitan cuts the sequence over the "
            f"--tensor-model-parallel-size {spread.tensor} too; plan with --sequence-parallel"
        )
    if spread.data > 1 and not spread.distributed:
        raise ConfigError(
            "--no-use-distributed-optimizer: torchtitan keeps whole replicas only without any "
            "other parallelism; plan with --use-distributed-optimizer"
        )
    if spread.expert_tensor not in (None, 1, spread.tensor):
        raise ConfigError(
            f"--expert-tensor-parallel-size {spread.expert_tensor}: torchtitan cuts experts as "
            f"layers or not at all; plan with {spread.tensor} or 1"
        )
    is_alone = spread.data * spread.context == 1
    if is_alone and spread.pipeline * spread.tensor > 1 and question.precision.name == "bf16":
        raise ConfigError(
            f"P={spread.pipeline} x TP={spread.tensor} leave one replica: torchtitan trains in "
            "bf16 only where weights are sharded over replicas or the sequence; plan with a "
            "smaller --pipeline-model-parallel-size or --tensor-model-parallel-size"
        )
    if question.shape.head.tied and spread.pipeline > 1:
        raise ConfigError(
            f"--pipeline-model-parallel-size {spread.pipeline}: torchtitan does not share a tied "
            "embedding between ranks; plan with --pipeline-model-parallel-size 1"
        )


_RUN = tuple(f.name for f in FAMILIES if f.runs and not f.takes_slices)

ENGINES: tuple[Engine, ...] = (
    Engine(
        name="fullbore",
        title="Fullbore's engine",
        schedules=_RUN,
        from_file=True,
        sizes=(),
        precisions=("bf16", "fp32"),
        recompute=("none", "full", "some"),
        numbers=_megatron_numbers,
        spreads=_nothing_of_spreads,
        states=adam_in_32_bits,
    ),
    Engine(
        name="megatron",
        title="Megatron-LM",
        schedules=("1f1b", "interleaved"),
        from_file=False,
        sizes=("tensor", "context", "expert"),
        precisions=("bf16", "fp16", "fp8", "fp8_mx", "fp8_weights", "fp32"),
        recompute=("none", "selective", "full", "some"),
        numbers=_megatron_numbers,
        spreads=_nothing_of_spreads,
        states=any_optimizer,
    ),
    Engine(
        name="deepspeed",
        title="DeepSpeed",
        schedules=("1f1b",),
        from_file=False,
        sizes=(),
        precisions=("bf16", "fp16", "fp32"),
        recompute=("none", "full"),
        numbers=_nothing_of_numbers,
        spreads=_nothing_of_spreads,
        states=adam_or_sgd_in_32_bits,
    ),
    Engine(
        name="torchtitan",
        title="torchtitan",
        schedules=_RUN,
        from_file=True,
        sizes=("tensor", "context", "expert"),
        precisions=("bf16", "fp32"),
        recompute=("none", "full"),
        numbers=_torchtitan_numbers,
        spreads=_torchtitan_spreads,
        states=adam_in_32_bits,
    ),
)
