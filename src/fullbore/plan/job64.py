"""The 64-GPU job: what GPipe, 1F1B, interleaving and the best schedule really do for it.

8 nodes of 8 H100, an 80-layer model in 8 pipeline stages, microbatches of 2, batches of 128. Claims
about it in circulation (bubble 32.4, 18.2, 6.4 %; activations 68.5, 34.2, 28.6 GB; a speed-up of
2.25) name neither model, sequence nor M, and no single M gives them. Here all three are stated, and
every row follows from the same costs. The model is Llama 3 70B's shape, since it has 80 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from fullbore.cost.hardware import Cluster
from fullbore.cost.model import Recompute
from fullbore.cost.model.hugging_face import shape_of
from fullbore.ir import Program, Schedule
from fullbore.plan.choice import NONE, Choice, Spread, recompute_name
from fullbore.plan.evaluate import Evaluator
from fullbore.plan.figures import figures
from fullbore.plan.parts import parts_of
from fullbore.plan.planner import Progress, plan
from fullbore.plan.question import Fixed, Question
from fullbore.plan.splits import even
from fullbore.schedules import gpipe

__all__ = ["TENSOR", "Factor", "Job", "Row", "job_of", "question_of"]

TENSOR = (8, 4, 2)  # M = 64, 32, 16

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to run the job. activation_bytes, total_bytes: of the fullest rank.

    bubble: idle / total of this schedule with equal stages and no latency, which is what claims and
    formulas mean. idle: the same as it is, uneven stages and messages included.
    """

    name: str
    choice: Choice
    bubble: float
    idle: float
    activation_bytes: float
    total_bytes: float
    fits: bool
    step_s: float
    mfu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One change after another from GPipe as it would have to run, and the step after it."""

    change: str
    step_s: float
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job at one M: rows, the first of them GPipe with all microbatches at once; the claims'
    bar (bubble under 6.4 % and activations under 41.8 % of GPipe's), met by `bar` or None; factors.
    """

    spread: Spread
    rows: tuple[Row, ...]
    bar: Row | None
    factors: tuple[Factor, ...]

    @property
    def speedup(self) -> float:
        """Of the best row over GPipe as it would have to run."""
        return self.factors[0].step_s / self.factors[-1].step_s


def question_of(*, tensor: int, overlap: bool = True) -> Question:
    """The job as a question."""
    return Question(
        shape=replace(shape_of(_CONFIG), name="80 layers, as Llama 3 70B"),
        cluster=Cluster.parse("h100:8x8"),
        global_batch=128,
        sequence=4096,
        fixed=Fixed(pipeline=(8,), tensor=(tensor,), microbatch_size=(2,)),
        overlap_messages=overlap,
    )


def job_of(*, tensor: int, report: Callable[[Progress], None] = lambda progress: None) -> Job:
    """The job with this tensor parallelism, which decides M. report: as of `plan`."""
    made = plan(question_of(tensor=tensor), top=100, report=report)
    evaluator, spread = made.evaluator, made.winner.choice.spread

    def row(name: str, choice: Choice) -> Row:
        return _row(evaluator, name, evaluator.with_layers(choice))

    def fitted(name: str, schedule: str) -> list[Row]:
        """The fastest of a schedule that fits, told apart only where the plain one does not."""
        one = made.known.get((spread, schedule))
        return [] if one is None else [row(name, one.choice)]

    whole = Choice(spread=spread, schedule="gpipe", virtual_stages=1)
    again = replace(whole, recompute=Recompute(granularity="full"))
    rounds, both = _rounds(evaluator, whole), _rounds(evaluator, again)
    plain = [row("1F1B", replace(whole, schedule="1f1b")), row("interleaved, v=2", _v2(whole))]
    rows = [
        row("GPipe, all M at once", whole),
        *([row(f"GPipe, rounds of {rounds[1]}", rounds[0])] if rounds else []),
        row("GPipe, all recomputed", again),
        *([row(f"GPipe, rounds of {both[1]}, recomputed", both[0])] if both else []),
        plain[0],
        *([] if plain[0].fits else fitted("1F1B that fits", "1f1b")),
        plain[1],
        *([] if plain[1].fits else fitted("interleaved that fits", "interleaved")),
        row("best", made.winner.choice),
    ]
    known = sorted(made.known.values(), key=lambda one: one.order)
    found = (row(one.choice.schedule, one.choice) for one in known)
    limit = 0.418 * rows[0].activation_bytes
    bar = (one for one in found if one.bubble < 0.064 and one.activation_bytes < limit)
    return Job(
        spread=spread,
        rows=tuple(rows),
        bar=next(bar, None),
        factors=tuple(_factors(tensor, rows)),
    )


def _v2(choice: Choice) -> Choice:
    ranks = choice.spread.pipeline
    return replace(choice, schedule="interleaved", virtual_stages=2, group=ranks)


def _row(evaluator: Evaluator, name: str, choice: Choice) -> Row:
    one, memory = evaluator.evaluate(choice), evaluator.memory(choice)
    step, load, parts = evaluator.step(choice), evaluator.load(choice), parts_of(evaluator, choice)
    average_s = float(load.busy_s.mean())
    return Row(
        name=name,
        choice=choice,
        bubble=parts.bubble_s / (parts.bubble_s + average_s),
        idle=1 - average_s / step.pipeline_s,
        activation_bytes=float((memory.activations + memory.logits).max()),
        total_bytes=one.peak_bytes,
        fits=one.fits,
        step_s=one.step_s,
        mfu=figures(evaluator.question, choice, step_s=one.step_s).mfu,
    )


def _rounds(evaluator: Evaluator, whole: Choice) -> tuple[Choice, int] | None:
    """GPipe over as many microbatches at a time as fit, and how many those are."""
    microbatches = whole.spread.microbatches
    for number in range(microbatches // 2, 0, -1):
        if microbatches % number:
            continue
        name = f"gpipe-{number}"
        made = _in_rounds(ranks=whole.spread.pipeline, microbatches=microbatches, number=number)
        evaluator.programs.add(name, made, base=whole)
        choice = evaluator.with_layers(replace(whole, schedule=name))
        if float(evaluator.held(choice).max()) <= evaluator.question.limit_bytes:
            return choice, number
    return None


def _in_rounds(*, ranks: int, microbatches: int, number: int) -> Schedule:
    """GPipe of `number` microbatches again and again; gradients add up, nothing waits between."""
    once = gpipe(ranks=ranks, microbatches=number)
    starts = np.arange(0, microbatches, number, dtype=np.int32)
    return replace(
        once,
        name=f"gpipe-{number}",
        microbatches=microbatches,
        programs=tuple(
            Program(
                kind=np.tile(one.kind, len(starts)),
                stage=np.tile(one.stage, len(starts)),
                microbatch=np.concatenate([one.microbatch + start for start in starts]),
            )
            for one in once.programs
        ),
    )


def _factors(tensor: int, rows: list[Row]) -> Iterator[Factor]:
    """From the faster GPipe that fits, with equal stages and blocking sends, to the best."""
    fitting = [row for row in rows if row.fits]
    start = min((row for row in fitting if row.name.startswith("GPipe")), key=lambda r: r.step_s)
    whole = replace(start.choice, layers=even(layers=80, stages=start.choice.stages))
    blocking = _stepper(question_of(tensor=tensor, overlap=False), start)
    overlapped = _stepper(question_of(tensor=tensor), start)
    steps = [
        (f"{start.name}, equal stages, blocking sends", blocking(whole)),
        ("messages overlapped", overlapped(whole)),
        ("stages balanced by cost", start.step_s),
        *((_told(row), row.step_s) for row in fitting if not row.name.startswith("GPipe")),
    ]
    before = steps[0][1]
    for change, step_s in steps:
        yield Factor(change=change, step_s=step_s, speedup=before / step_s)
        before = step_s


def _told(row: Row) -> str:
    choice = row.choice
    again = "" if choice.recompute == NONE else f", recompute {recompute_name(choice.recompute)}"
    return f"{row.name}: {choice.schedule}, v={choice.virtual_stages}{again}"


def _stepper(question: Question, start: Row) -> Callable[[Choice], float]:
    """Seconds of a step under a question; rounds of GPipe are built for it."""
    evaluator = Evaluator(question)
    name = start.choice.schedule
    if name.startswith("gpipe-"):
        spread = start.choice.spread
        number = int(name.removeprefix("gpipe-"))
        made = _in_rounds(ranks=spread.pipeline, microbatches=spread.microbatches, number=number)
        evaluator.programs.add(name, made, base=start.choice)
    return lambda choice: evaluator.step(evaluator.with_layers(choice)).total_s
