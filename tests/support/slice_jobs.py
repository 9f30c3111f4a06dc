"""Jobs run by real ranks: sequences in slices, against one process that runs them whole.

Each job takes many cases, so that one set of processes serves them all.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from family_jobs import Marked
from pipe_models import Grads, gradients, own
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from fullbore import schedules
from fullbore.ir import Action, Placement, Program, Schedule
from fullbore.passes import recompute_ahead, split_backward
from fullbore.runtime import Pipeline

WIDTH, HEADS, IDS, LENGTH, ROWS = 12, 2, 17, 11, 2
IGNORED = -100


@dataclass(frozen=True)
class Case:
    """M sequences of k slices each, and what else is asked of the engine."""

    microbatches: int
    slices: int
    split: bool = False
    recompute: str = "none"
    record: bool = False
    overlap: bool = True
    dtype: torch.dtype = torch.float64
    stages: int | None = None  # all on one rank

    def schedule(self, ranks: int) -> Schedule:
        if self.stages is not None:
            return on_one_rank(self.stages, self.microbatches, self.slices)
        made = schedules.seq1f1b(ranks=ranks, microbatches=self.microbatches, slices=self.slices)
        made = split_backward(made, delay=2) if self.split else made
        return recompute_ahead(made, ahead=1) if self.recompute == "placed" else made


def on_one_rank(stages: int, microbatches: int, slices: int) -> Schedule:
    """Sequence after sequence, slice after slice through all stages, and back."""
    row: list[str] = []
    for first in range(0, microbatches * slices, slices):
        numbers = range(first, first + slices)
        row += [f"{stage}F{m}" for m in numbers for stage in range(stages)]
        row += [f"{stage}B{m}" for m in reversed(numbers) for stage in reversed(range(stages))]
    return Schedule(
        name="by-hand",
        microbatches=microbatches * slices,
        slices=slices,
        placement=Placement(stage_to_rank=(0,) * stages),
        programs=(Program.of(map(Action.parse, row)),),
    )


# -- stages ---------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Causal attention and an MLP, for whole sequences or slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, carry: Any = None) -> Any:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if carry:
            k, v = torch.cat([carry[0], k], dim=1), torch.cat([carry[1], v], dim=1)
        before = k.shape[1] - q.shape[1]
        q_heads, k_heads, v_heads = (
            t.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2) for t in (q, k, v)
        )
        scores = q_heads @ k_heads.transpose(2, 3) / math.sqrt(WIDTH / HEADS)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + before)
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v_heads
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(functional.gelu(self.up(x)))
        return x if carry is None else (x, (k, v))


class Running(nn.Module):
    """A state that goes from token to token: nothing of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, carry: Any = None) -> Any:
        output, state = self.cell(x, carry["state"] if carry else None)
        return output if carry is None else (x + output, {"state": state, "tokens": x.shape[1]})


class Ends(nn.Module):
    """A block with a table in front of it, or its product behind it, or both."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.table, self.block = nn.Embedding(IDS, WIDTH), Attending()

    def forward(self, x: torch.Tensor, carry: Any = None) -> Any:
        x = self.table(x) if self.first else x
        output = self.block(x, carry)
        x, kept = (output, None) if carry is None else output
        x = functional.linear(x, self.table.weight) if self.last else x
        return x if carry is None else (x, kept)


def make_stages(count: int, dtype: torch.dtype) -> list[nn.Module]:
    """Ids in, logits out by the first stage's table; the same on every rank."""
    torch.manual_seed(4)
    ends = [Ends(first=True, last=count == 1)]
    ends += [Ends(first=False, last=True)] if count > 1 else []
    ends[-1].table.load_state_dict(ends[0].table.state_dict())
    middle: list[nn.Module] = [Attending() for _ in range(count - 2)]
    return [stage.to(dtype) for stage in [ends[0], *middle, *ends[1:]]]


def token_sum(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the tokens that count."""
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def counted(targets: torch.Tensor) -> float:
    return float((targets != IGNORED).sum())


def text(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and the ids that follow them, of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(IDS, (rows, LENGTH + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = IGNORED
    return ids[:, :-1], targets


# -- exactness ------------------------------------------------------------------------------------


def compare(rank: int, ranks: int, cases: list[Case]) -> dict[Case, tuple[float, float]]:
    """For each case the largest error of any gradient over two steps, as a share of that weight's
    largest gradient, and that of the losses, evaluation included.
    """
    return {case: _compare(rank, ranks, case) for case in cases}


def _compare(rank: int, ranks: int, case: Case) -> tuple[float, float]:
    schedule = case.schedule(ranks)
    stages, twins = (make_stages(schedule.stages, case.dtype) for _ in range(2))
    mine, last = own(stages, schedule, rank), schedule.stages - 1
    tied = [{0: "table.weight", last: "table.weight"}] if last else []
    off = loss_off = 0.0
    pipe = Pipeline(
        mine,
        schedule,
        token_sum,
        count_fn=counted,
        tied=tied,
        recompute=case.recompute,  # type: ignore[arg-type]
        record=case.record,
        overlap_p2p=case.overlap,
    )
    with pipe:
        for step in range(2):
            ids, targets = text(ROWS * case.microbatches, seed=step)
            loss, expected = whole(twins, ids, targets)
            off = max(off, largest_error(gradients(mine), {}, zero=True))
            result = pipe.step(ids, targets)
            evaluated = pipe.evaluate(ids, targets) if step else result
            off = max(off, largest_error(gradients(mine), expected))
            assert result.loss is not None and evaluated.loss is not None
            loss_off = max(loss_off, abs(result.loss - loss), abs(evaluated.loss - loss))
            for module in (*stages, *twins):
                module.zero_grad()
    return off, loss_off


def compare_replicas(rank: int, case: Case) -> float:
    """The largest error of any gradient where two ranks are replicas, each with rows of its own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    stage, twin = (make_stages(1, case.dtype)[0] for _ in range(2))
    ids, targets = text(2 * ROWS * case.microbatches, seed=1)
    _, expected = whole([twin], ids, targets)
    mine = slice(rank, None, 2)
    with Pipeline({0: stage}, case.schedule(1), token_sum, count_fn=counted, mesh=mesh) as pipe:
        pipe.step(ids[mine], targets[mine])
    return largest_error(gradients({0: stage}), expected)


def whole(
    stages: Sequence[nn.Module], ids: torch.Tensor, targets: torch.Tensor
) -> tuple[float, Grads]:
    """Loss and gradients of one process, the whole batch at once, sequences whole; gradients of
    the two tables are summed.
    """
    value: Any = ids
    for stage in stages:
        value = stage(value)
    loss = token_sum(value, targets) / counted(targets)
    loss.backward()
    found = gradients(dict(enumerate(stages)))
    last = len(stages) - 1
    if last:
        first, other = found["0.table.weight"], found[f"{last}.table.weight"]
        assert first is not None and other is not None
        found["0.table.weight"] = found[f"{last}.table.weight"] = first + other
    return float(loss.detach()), found


def largest_error(found: Grads, expected: Grads, *, zero: bool = False) -> float:
    """As a share of the largest element of each expected gradient; zero: none is there yet."""
    if zero:
        return float(any(gradient is not None for gradient in found.values()))
    worst = 0.0
    for name, gradient in found.items():
        other = expected[name]
        if gradient is None or other is None:
            worst = max(worst, float(gradient is not other))
            continue
        worst = max(worst, float((gradient - other).abs().max() / other.abs().max()))
    return worst


# -- memory ---------------------------------------------------------------------------------------


class Watched(nn.Module):
    """A product whose input is counted for as long as anybody holds it; its output goes on to the
    next stage and to the next slice.
    """

    def __init__(self, alive: weakref.WeakValueDictionary, most: list[int]) -> None:
        super().__init__()
        self.product, self.alive, self.most = nn.Linear(WIDTH, WIDTH), alive, most

    def forward(self, x: torch.Tensor, carry: Any = None) -> Any:
        given = Marked.apply(x, self.alive)  # type: ignore[no-untyped-call]
        self.most[0] = max(self.most[0], len(self.alive))
        output = self.product(given)
        output = output + carry if torch.is_tensor(carry) else output
        return output, output * 2


def live(rank: int, ranks: int, cases: list[Case]) -> dict[Case, int]:
    """Most inputs of products that a rank held at once, for each case."""
    gc.disable()  # what dies, dies at once, not by the collector
    found = {}
    for case in cases:
        schedule = case.schedule(ranks)
        alive: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        most = [0]
        stages: list[nn.Module] = [Watched(alive, most) for _ in range(schedule.stages)]
        rows = ROWS * case.microbatches
        with Pipeline(own(stages, schedule, rank), schedule, functional.mse_loss) as pipe:
            for _ in range(2):
                pipe.step(torch.randn(rows, 8, WIDTH), torch.randn(rows, 8, WIDTH))
                assert not alive
        found[case] = most[0]
    return found
