"""Cases 13 to 15 and 17 to 20: numbers of microbatches, shapes, arguments, failures, evaluation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from bench import GROUP_TIMEOUT_S, Bench, Outcome
from rig import (
    EVERY,
    INTERLEAVED,
    ONE_F_ONE_B,
    SPLIT,
    WIDTH,
    ZBV,
    ZERO_BUBBLE,
    Block,
    Kind,
    M,
    Rig,
    batch,
    blocks,
    mse,
    one_step,
)
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import _Replicate
from words import Row, failed_words, failure_of, judge, shorten

NUMBERS = (1, 2, 3, 6, 9)


def numbers_of_microbatches(rank: int, ranks: int, kind: Kind, ms: Sequence[int]) -> Any:
    """For each M what torch says before it runs, or else its gradients and those of one process."""
    said: dict[int, str] = {}
    gradients: dict[int, Any] = {}
    for m in ms:
        try:
            rig = Rig(rank, ranks, kind, m=m)
        except Exception as error:
            said[m] = f"refused, {type(error).__name__}: {shorten(str(error))}"
            continue
        gradients[m] = one_step(rig, *batch(2 * m))
    return said, gradients


def case_13(bench: Bench) -> Iterator[Row]:
    """M = 1, M < P, M no multiple of P, on four ranks."""
    for kind in EVERY:
        outcomes = bench.run(numbers_of_microbatches, 4, kind, NUMBERS)
        together = None if failure_of(outcomes) else outcomes
        for m in NUMBERS:
            words = _of_number(m, together or bench.run(numbers_of_microbatches, 4, kind, [m]))
            yield Row(tried=kind.name, under=f"M={m}", words=words)


def _of_number(m: int, outcomes: list[Outcome]) -> str:
    if failure := failure_of(outcomes):
        return failure
    if m in outcomes[0].value[0]:
        return str(outcomes[0].value[0][m])
    return judge([Outcome(value=outcome.value[1][m]) for outcome in outcomes])


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that has no use for its target, nor for its shape."""
    return output.square().mean()


LOSSES = {"a target of the same shape": mse, "a loss of any shape": mean_square}


def after_another_shape(
    rank: int, ranks: int, kind: Kind, loss: str, before: tuple[int, int], now: tuple[int, int]
) -> Any:
    """A step on one shape, [rows, length], then one on another: the gradients of the second."""
    rig = Rig(rank, ranks, kind, loss=LOSSES[loss])
    rig.step(*batch(before[0], length=before[1]))
    rig.zero_grad()
    return one_step(rig, *batch(now[0], length=now[1]))


def case_14(bench: Bench) -> Iterator[Row]:
    """The last batch is short: 10 rows, or 3, over M = 4 after 12."""
    for count in (10, 3):
        for loss in LOSSES if count == 10 else ("a loss of any shape",):
            for kind in (ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE):
                shapes = ((12, 3), (count, 3))
                words = judge(bench.run(after_another_shape, 2, kind, loss, *shapes, limit_s=7))
                yield Row(tried=f"{count} rows, {loss}", under=kind.name, words=words)


def lengths_within_a_step(rank: int, ranks: int, kind: Kind, lengths: Sequence[int]) -> Any:
    """Microbatches of these lengths, by the method that step() calls with what it has cut."""
    rig = Rig(rank, ranks, kind, loss=mean_square)
    parts = [batch(2, seed=n, length=n) for n in lengths]
    rig.alone([x for x, _ in parts], [y for _, y in parts])
    for stage in rig.stages:
        stage.has_backward = True
    rig.schedule._step_microbatches(
        [(x,) for x, _ in parts] if rank == 0 else None,
        target_mbs=[y for _, y in parts] if rig.count - 1 in rig.modules else None,
    )
    return rig.gradients()


def case_15(bench: Bench) -> Iterator[Row]:
    """Lengths that change from step to step, and within a step."""
    for before, now in ((5, 3), (3, 5)):
        for loss in LOSSES:
            for kind in (ONE_F_ONE_B, INTERLEAVED):
                shapes = ((2 * M, before), (2 * M, now))
                words = judge(bench.run(after_another_shape, 2, kind, loss, *shapes, limit_s=6))
                tried = f"length {before}, then {now}, {loss}"
                yield Row(tried=tried, under=kind.name, words=words)
    for lengths in ([4, 3, 2, 1], [1, 2, 3, 4]):
        words = judge(bench.run(lengths_within_a_step, 2, ONE_F_ONE_B, lengths, limit_s=6))
        tried = f"{lengths} in a step, by the private _step_microbatches: step() cannot be given it"
        yield Row(tried=tried, under=ONE_F_ONE_B.name, words=words)


class Weighted(nn.Module):
    """Multiplies by the mean row of a table that belongs to the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, *, table: Any) -> torch.Tensor:
        return self.block(x) * table.mean(dim=0)  # type: ignore[no-any-return]


def whole_table(rank: int, ranks: int, kind: Kind, replicate: bool) -> Any:  # noqa: FBT001
    """A table of 6 rows, for every microbatch the same."""
    table = torch.arange(6 * WIDTH, dtype=torch.float32).reshape(6, WIDTH) / 10
    options = {"kwargs_chunk_spec": {"table": _Replicate}} if replicate else {}
    modules = blocks(kind.per_rank * ranks, Weighted)
    return one_step(Rig(rank, ranks, kind, modules, **options), *batch(2 * M), table=table)


def table_each(rank: int, ranks: int, kind: Kind) -> Any:
    """A list with one table a microbatch."""
    tables = [torch.full((3, WIDTH), float(i + 1)) for i in range(M)]
    rig = Rig(rank, ranks, kind, blocks(kind.per_rank * ranks, Weighted))
    x, y = batch(2 * M)
    for part, wanted, table in zip(rig.cut(x), rig.cut(y), tables, strict=True):
        (rig.loss(rig.chain(part, table=table), wanted) / M).backward()
    rig.step(x, y, table=tables)
    return rig.gradients()


def case_17(bench: Bench) -> Iterator[Row]:
    """Keyword arguments that are not cut along their rows."""
    kind = ONE_F_ONE_B
    for tried, job, args in (
        ("a table of 6 rows for all microbatches", whole_table, [False]),
        ("the same, kwargs_chunk_spec of the private _Replicate", whole_table, [True]),
        ("a list of one table a microbatch", table_each, []),
    ):
        words = judge(bench.run(job, 2, kind, *args))
        yield Row(tried=tried, under=kind.name, words=words)


def failing(rank: int, ranks: int, kind: Kind, how: str) -> None:
    """The last rank raises, stops answering after it has raised, or is killed, in a second step."""
    rig = Rig(rank, ranks, kind)
    rig.step(*batch(2 * M))
    calls = iter(range(100))

    def fail(*_: Any) -> None:
        if next(calls) == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("on purpose")

    if rank == ranks - 1:
        rig.modules[max(rig.modules)].register_forward_pre_hook(fail)
    try:
        rig.step(*batch(2 * M))
    except RuntimeError:
        if how == "lingers" and rank == ranks - 1:
            time.sleep(GROUP_TIMEOUT_S + 2)  # it saves what it can, or sits in a debugger
        raise


def case_18(bench: Bench) -> Iterator[Row]:
    """The last of four ranks fails in the middle of a step: what each says."""
    for how in ("raises", "killed", "lingers"):
        for kind in (ONE_F_ONE_B, INTERLEAVED) if how != "lingers" else (ONE_F_ONE_B,):
            outcomes = bench.run(failing, 4, kind, how, limit_s=7)
            tried = {"lingers": "raises, its process stays"}.get(how, how)
            if how == "raises":
                yield Row(tried=tried, under=f"{kind.name}, itself", words=_in_full(outcomes[-1]))
            yield Row(tried=tried, under=f"{kind.name}, the others", words=_others(outcomes[:-1]))


def _in_full(outcome: Outcome) -> str:
    words = f"{shorten(outcome.error or 'no error')} from {outcome.cause}"
    return f"{words}; its log names {outcome.logged}" if outcome.logged else words


def _others(outcomes: list[Outcome]) -> str:
    said: dict[str, list[float]] = {}
    for outcome in outcomes:
        words = failed_words(outcome) if outcome.failed else "no error"
        said.setdefault(words, []).append(outcome.after_s)
    return "; ".join(f"{words} (after {max(times):.1f} s)" for words, times in said.items())


class Bare(nn.Module):
    """No weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


def bare_stage(rank: int, ranks: int, kind: Kind, place: int) -> Any:
    modules = blocks(kind.per_rank * ranks)
    modules[place] = Bare()
    return one_step(Rig(rank, ranks, kind, modules), *batch(2 * M))


def empty_stages(rank: int, ranks: int, kind: Kind) -> Any:
    """Fewer layers than stages: those left over are empty."""
    modules = [*blocks(1), *(nn.Sequential() for _ in range(kind.per_rank * ranks - 1))]
    return one_step(Rig(rank, ranks, kind, modules), *batch(2 * M))


def fewer_stages(rank: int, ranks: int) -> Any:
    PipelineStage(Block(), 0, ranks - 1, torch.device("cpu"))


def case_19(bench: Bench) -> Iterator[Row]:
    """Stages without parameters, fewer layers than stages."""
    for place in (0, 1):
        for kind in (ONE_F_ONE_B, *SPLIT):
            words = judge(bench.run(bare_stage, 2, kind, place))
            tried = f"stage {place} without parameters"
            yield Row(tried=tried, under=kind.name, words=words)
    for kind in (ONE_F_ONE_B, *SPLIT):
        words = judge(bench.run(empty_stages, 2, kind))
        yield Row(tried="all stages but the first empty", under=kind.name, words=words)
    words = failure_of(bench.run(fewer_stages, 2)) or "no error"
    yield Row(tried="fewer stages than ranks", words=words)


def evaluation(rank: int, ranks: int, kind: Kind, steps: str) -> Any:
    """The losses of the last of some steps, and those of one process.

    steps: t a training step, e an evaluation of its shape, E one of another shape.
    """
    rig = Rig(rank, ranks, kind, loss=mean_square)
    for what in steps:
        x, y = batch((5 if what == "E" else 2) * M, seed=9)
        found = rig.step(x, y) if what == "t" else rig.evaluate(x, y)
    with torch.no_grad():
        pairs = zip(rig.cut(x), rig.cut(y), strict=True)
        expected = [float(rig.loss(rig.chain(part), wanted)) for part, wanted in pairs]
    return [float(loss) for loss in found], expected


def case_20(bench: Bench) -> Iterator[Row]:
    """Evaluation, before and after training, of other shapes, on every schedule."""
    for tried, steps, kinds in (
        ("evaluate", "e", EVERY),
        ("evaluate, train, evaluate", "ete", (ONE_F_ONE_B, ZERO_BUBBLE)),
        ("train, evaluate another shape", "tE", (ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE)),
        ("evaluate, evaluate more rows", "eE", (ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE)),
        ("evaluate, evaluate fewer rows", "Ee", (ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE)),
    ):
        for kind in kinds:
            outcomes = bench.run(evaluation, 2, kind, steps, limit_s=6)
            last = 0 if kind is ZBV else -1
            words = failure_of(outcomes) or _losses(*outcomes[last].value)
            yield Row(tried=tried, under=kind.name, words=words)


def _losses(found: list[float], expected: list[float]) -> str:
    if len(found) != len(expected):
        return f"wrong: {len(found)} losses, not {len(expected)}"
    off = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
    return "right" if off < 1e-5 else f"wrong: a loss off by {100 * off:.3g} %"


CASES: dict[int, Callable[[Bench], Iterator[Row]]] = {
    13: case_13,
    14: case_14,
    15: case_15,
    17: case_17,
    18: case_18,
    19: case_19,
    20: case_20,
}
