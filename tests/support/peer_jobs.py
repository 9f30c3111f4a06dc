"""Jobs run by real ranks: what other pipeline engines get wrong."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from gradient_jobs import Case, make
from pipe_models import (
    WIDTH,
    Block,
    batch,
    block_stages,
    chain,
    differences,
    gradients,
    mse,
    own,
    pipeline,
    reference,
)
from torch import nn

from fullbore.errors import FullboreError
from fullbore.runtime import Pipeline


class Setting:
    """A pipeline and its twin for one process, for one case."""

    def __init__(self, rank: int, ranks: int, case: Case, **options: Any) -> None:
        self.rank, self.schedule = rank, make(case, ranks)
        self.m = self.schedule.microbatches
        self.stages, self.twins = (block_stages(self.schedule.stages) for _ in range(2))
        self.pipe: Pipeline = pipeline(self.stages, self.schedule, rank, **options)

    def grads(self) -> dict[str, torch.Tensor | None]:
        return gradients(own(self.stages, self.schedule, self.rank))

    def reference(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return reference(self.twins, torch.tensor_split(x, self.m), torch.tensor_split(y, self.m))[
            1
        ]


def one_after_another(rank: int, ranks: int, job: Any, cases: list[Case], *args: Any) -> list[Any]:
    """The job for each case, in the same processes."""
    return [job(rank, ranks, case, *args) for case in cases]


def evaluation_leaves_gradients_alone(rank: int, ranks: int, case: Case) -> list[str]:
    s = Setting(rank, ranks, case)
    x, y = batch(2 * s.m)
    expected = s.reference(x, y)
    s.pipe.step(x, y)
    s.pipe.evaluate(*batch(3 * s.m))
    return differences(s.grads(), expected)


def two_steps_add_up(rank: int, ranks: int, case: Case) -> list[str]:
    s = Setting(rank, ranks, case)
    for seed in (1, 2):
        x, y = batch(2 * s.m, seed=seed)
        expected = s.reference(x, y)
        s.pipe.step(x, y)
    return differences(s.grads(), expected)


class _Fails(Exception):
    pass


def a_step_after_a_failed_one_is_clean(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    s = Setting(rank, ranks, case)
    x, y = batch(2 * s.m)
    s.pipe.step(x, y)
    victim = s.schedule.stages - 1
    calls = iter(range(100))

    def fail(*_: Any) -> None:
        if next(calls) == 1:
            raise _Fails("on purpose")

    hook = s.stages[victim].register_forward_pre_hook(fail)
    begun = time.monotonic()
    try:
        s.pipe.step(x, y)
        error = "none"
    except FullboreError as failure:
        error = str(failure)
    took_s = time.monotonic() - begun
    hook.remove()
    for module in (*s.stages, *s.twins):
        module.zero_grad()
    expected = s.reference(x, y)
    s.pipe.step(x, y)
    return {"error": error, "took_s": took_s, "wrong": differences(s.grads(), expected)}


class SometimesUses(Block):
    """Hands on a second output, which only some microbatches use, and has an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, aside: torch.Tensor | None = None) -> Any:
        if aside is not None and float(x.detach().sum()) > 0:
            x = x + aside
        return super().forward(x), self.side(x)


def unused_and_sometimes_used(rank: int, ranks: int, case: Case) -> list[str]:
    schedule = make(case, ranks)
    torch.manual_seed(3)
    stages = [SometimesUses() for _ in range(schedule.stages)]
    torch.manual_seed(3)
    twins = [SometimesUses() for _ in range(schedule.stages)]

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return mse(output[0], target)

    pipe = pipeline(stages, schedule, rank, loss)
    wrong = []
    for seed in (5, 6, 7):
        x, y = batch(schedule.microbatches, seed=seed)
        m = schedule.microbatches
        _, expected = reference(twins, x.chunk(m), y.chunk(m), loss)
        pipe.step(x, y)
        mine = gradients(own(stages, schedule, rank))
        assert all(grad is None for name, grad in mine.items() if "unused" in name)
        wrong += differences(mine, expected)
    return wrong


def hooks_fire_once(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    s = Setting(rank, ranks, case)
    counts = {"weight": 0, "accumulated": 0, "boundary": 0}

    def count(what: str) -> Any:
        def hook(*_: Any) -> None:
            counts[what] += 1

        return hook

    mine = own(s.stages, s.schedule, rank)
    stage = min(mine)
    weight = mine[stage].twice
    weight.register_hook(count("weight"))
    weight.register_post_accumulate_grad_hook(count("accumulated"))

    def watch(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(count("boundary"))

    mine[stage].register_forward_pre_hook(watch)
    for step in range(5):
        s.pipe.step(*batch(2 * s.m, seed=step))
    return {"stage": stage, "per_step": {what: n / 5 for what, n in counts.items()}, "m": s.m}


def a_short_last_batch(rank: int, ranks: int, case: Case, rows: int) -> list[str]:
    s = Setting(rank, ranks, case)
    s.pipe.step(*batch(12 * s.m))
    for module in s.stages:
        module.zero_grad()
    x, y = batch(rows)
    expected = s.reference(x, y)
    s.pipe.step(x, y)
    return differences(s.grads(), expected)


def a_batch_that_is_too_short(rank: int, ranks: int, case: Case) -> str:
    s = Setting(rank, ranks, case)
    try:
        s.pipe.step(*batch(s.m - 1))
    except FullboreError as error:
        return str(error)
    return "no error"


def lengths_change(rank: int, ranks: int, case: Case) -> list[str]:
    """Sequence lengths differ from step to step, and from microbatch to microbatch."""
    s = Setting(rank, ranks, case)
    wrong = []
    for lengths in ([3] * s.m, [5] * s.m, list(range(1, s.m + 1)), [3] * s.m, [5] * s.m):
        generator = torch.Generator().manual_seed(sum(lengths))
        x = [torch.randn(2, n, WIDTH, generator=generator) for n in lengths]
        y = [torch.randn(2, n, WIDTH, generator=generator) for n in lengths]
        _, expected = reference(s.twins, x, y)
        s.pipe.step(x, y)
        wrong += differences(s.grads(), expected)
    return wrong


class Nest(nn.Module):
    """Passes on every kind of thing that crosses boundaries, and begins with an in-place change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, Block()

    def forward(self, *args: Any) -> Any:
        x, extras = self.open(args)
        x = x.mul_(1.5) if x.requires_grad and not x.is_leaf else x * 1.5
        x = self.inner(x)
        mask = extras.get("mask", torch.ones(x.shape[0], dtype=torch.bool))
        ids = extras.get("ids", torch.arange(x.shape[0]))
        bias = extras.get("bias", torch.full((1, WIDTH), 0.5))
        x = torch.where(mask[:, None], x + bias + ids[:, None], x)
        if self.kind == "tuple":
            return x, mask, None, ids, bias
        if self.kind == "dict":
            return {"x": x, "mask": mask, "none": None, "ids": ids, "bias": bias, "number": 3}
        if self.kind == "view":
            return torch.cat([x, x], dim=1)[:, ::2].t().t()[:, :WIDTH]
        return x

    def open(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, dict[str, Any]]:
        if isinstance(args[0], dict):
            rest = dict(args[0])
            assert rest.get("number", 3) == 3 and rest.get("none") is None
            return rest.pop("x"), rest
        if len(args) > 1:
            assert args[2] is None
            return args[0], {"mask": args[1], "ids": args[3], "bias": args[4]}
        return args[0], {}


def nests_cross(rank: int, ranks: int, case: Case, kind: str) -> list[str]:
    schedule = make(case, ranks)
    torch.manual_seed(4)
    stages = [Nest(kind) for _ in range(schedule.stages)]
    torch.manual_seed(4)
    twins = [Nest(kind) for _ in range(schedule.stages)]

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        x = output["x"] if isinstance(output, dict) else output
        x = x[0] if isinstance(x, tuple) else x
        return x.sum()  # its gradient has stride 0

    pipe = pipeline(stages, schedule, rank, loss)
    m, wrong = schedule.microbatches, []
    for seed in range(3):
        x, y = batch(2 * m, seed=seed)
        _, expected = reference(twins, x.chunk(m), y.chunk(m), loss)
        pipe.step(x, y)
        wrong += differences(gradients(own(stages, schedule, rank)), expected)
    return wrong


class Masked(Block):
    def forward(self, x: torch.Tensor, *, mask: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * mask * scale


def keyword_arguments(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    schedule = make(case, ranks)
    torch.manual_seed(5)
    stages = [Masked() for _ in range(schedule.stages)]
    torch.manual_seed(5)
    twins = [Masked() for _ in range(schedule.stages)]
    m = schedule.microbatches
    masks = [torch.full((1, WIDTH), float(i + 1)) for i in range(m)]  # one row: not the batch's
    x, y = batch(2 * m)
    for i, (part, target) in enumerate(zip(x.chunk(m), y.chunk(m), strict=True)):
        (mse(chain(twins, part, mask=masks[i], scale=0.5), target) / m).backward()
    pipe = pipeline(stages, schedule, rank)
    pipe.step(x, y, kwargs={"mask": masks, "scale": 0.5})
    wrong = differences(gradients(own(stages, schedule, rank)), gradients(dict(enumerate(twins))))
    try:
        pipe.step(x, y, kwargs={"mask": torch.ones(m + 1, WIDTH), "scale": 0.5})
        refused = "not refused"
    except FullboreError as error:
        refused = str(error)
    return {"wrong": wrong, "refused": refused}


def killed(rank: int, ranks: int, case: Case, victim: int, when: str) -> str:
    """A rank is killed in the middle of a step, of an evaluation, between two steps, or so long
    before a step that the others' connections to it have broken when they begin.
    """
    s = Setting(rank, ranks, case)
    x, y = batch(2 * s.m)
    s.pipe.step(x, y)
    if rank == victim and when in ("between", "long before"):
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "long before":
        time.sleep(0.5)
    if rank == victim:
        last = s.schedule.placement.stages_of(rank)[-1]
        s.stages[last].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    begun = time.monotonic()
    try:
        s.pipe.evaluate(x, y) if when == "evaluation" else s.pipe.step(x, y)
    except FullboreError as error:
        assert time.monotonic() - begun < 5, "took too long to notice"
        return str(error)
    return "no error"


def waits_in_clipping(rank: int, ranks: int, case: Case) -> str:
    """The last rank dies after a step while the others clip."""
    s = Setting(rank, ranks, case)
    s.pipe.step(*batch(2 * s.m))
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        s.pipe.clip_grad_norm(1.0)
    except FullboreError as error:
        return str(error)
    return "no error"


def evaluate_train_evaluate(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    s = Setting(rank, ranks, case)
    x, y = batch(2 * s.m)
    wide = batch(5 * s.m, seed=9)
    losses = [s.pipe.evaluate(*wide).loss]
    expected = s.reference(x, y)
    s.pipe.step(x, y)
    losses.append(s.pipe.evaluate(*wide).loss)
    with torch.no_grad():
        parts = zip(wide[0].chunk(s.m), wide[1].chunk(s.m), strict=True)
        alone = [float(mse(chain(s.twins, a), b)) for a, b in parts]
    result = s.pipe.evaluate(wide[0], return_outputs=True)
    outputs = None if result.outputs is None else torch.cat(result.outputs)
    with torch.no_grad():
        right = outputs is None or torch.equal(
            outputs, torch.cat([chain(s.twins, a) for a in wide[0].chunk(s.m)])
        )
    return {
        "losses": losses,
        "alone": sum(alone) / s.m,
        "wrong": differences(s.grads(), expected),
        "outputs_right": right,
        "loss_without_targets": result.loss,
        "training": all(module.training for module in own(s.stages, s.schedule, rank).values()),
    }


def boundary_messages(rank: int, ranks: int, case: Case) -> tuple[int, ...]:
    s = Setting(rank, ranks, case, record=True)
    for step in range(3):
        result = s.pipe.step(*batch(s.m, seed=step))
    assert result.boundary_messages is not None
    return result.boundary_messages


def live_outputs(rank: int, ranks: int, case: Case) -> dict[str, int]:
    """How many outputs of the last stage were alive at once, and after the step."""
    schedule = make(case, ranks)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal most
        alive.add(output)
        most = max(most, len(alive))
        return mse(output, target)

    pipe = pipeline(block_stages(schedule.stages), schedule, rank, loss)
    for step in range(2):
        pipe.step(*batch(2 * schedule.microbatches, seed=step))
    gc.collect()
    return {"most": most, "after": len(alive)}


class Mark:
    """Lives as long as the graph that holds it."""


class Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mark: Mark) -> torch.Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Watched(nn.Module):
    """Keeps count of how many graphs of its forwards are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.alive: list[weakref.ref[Mark]] = []
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mark = Mark()
        self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(mark)]
        self.most = max(self.most, len(self.alive))
        return Watch.apply(self.inner(x), mark)  # type: ignore[no-any-return,no-untyped-call]


def live_activations(rank: int, ranks: int, case: Case) -> list[int]:
    """Most graphs of this rank's first stage that were alive at once."""
    gc.disable()  # what dies, dies at once, not by the collector
    schedule = make(case, ranks)
    stages = [Watched() for _ in range(schedule.stages)]
    pipe = pipeline(stages, schedule, rank)
    for step in range(2):
        pipe.step(*batch(2 * schedule.microbatches, seed=step))
    return [stages[s].most for s in schedule.placement.stages_of(rank)]


def no_rank_waits_for_its_sends(rank: int, ranks: int, microbatches: int) -> bool:
    """Rank 1 takes nothing before rank 0 has computed all its forwards: no deadlock, no wait."""
    s = Setting(rank, ranks, ("gpipe", microbatches, None))
    x, y = batch(2 * s.m)
    s.pipe.step(x, y)
    store = dist.distributed_c10d._get_default_store()
    calls = iter(range(1000))

    def gate(*_: Any) -> None:
        call = next(calls)
        if rank == 0 and call == s.m - 1:
            store.set("all forwards done", "1")
        if rank == 1 and call == 0:
            store.wait(["all forwards done"])

    s.stages[rank].register_forward_hook(gate) if rank == 0 else s.stages[
        rank
    ].register_forward_pre_hook(gate)
    s.pipe.step(x, y)
    return True


def not_a_number(rank: int, ranks: int, case: Case) -> float | None:
    s = Setting(rank, ranks, case)
    x, y = batch(2 * s.m)
    y[0, 0] = float("nan")
    return s.pipe.step(x, y).loss


class Head(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, WIDTH)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) @ self.table.weight.t()


class Foot(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, WIDTH)
        self.block = Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.block(self.table(ids))


def tied_language_model(stages: int) -> list[nn.Module]:
    torch.manual_seed(6)
    made: list[nn.Module] = [Foot(20), *block_stages(stages - 2), Head(20)]
    made[-1].table.weight.data.copy_(made[0].table.weight.data)
    return made


def tied_embedding(rank: int, ranks: int, case: Case, max_norm: float) -> dict[str, Any]:
    """Twenty steps of AdamW with clipping on a model whose first and last weight are one."""
    schedule = make(case, ranks)
    stages = tied_language_model(schedule.stages)
    if rank:
        stages[-1].table.weight.data.zero_()  # the pipeline makes the copies equal

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target)

    last = schedule.stages - 1
    pipe = pipeline(stages, schedule, rank, loss, tied=[{0: "table.weight", last: "table.weight"}])
    mine = own(stages, schedule, rank)
    optimizer = torch.optim.AdamW(
        [p for module in mine.values() for p in module.parameters()], lr=1e-2
    )
    norms = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 20, (2 * schedule.microbatches,), generator=generator)
        for part in (ids, ids.roll(1)):  # two accumulated steps
            pipe.step(part, part.roll(3))
        norms.append(pipe.clip_grad_norm(max_norm))
        optimizer.step()
        optimizer.zero_grad()
    tables = {s: mine[s].table.weight.detach().clone() for s in (0, last) if s in mine}
    state = {
        f"{s}.{n}": p.detach().clone() for s, m in mine.items() for n, p in m.named_parameters()
    }
    return {"norms": norms, "tables": tables, "state": state}


def tied_alone(stages: int, microbatches: int, max_norm: float) -> dict[str, Any]:
    """The same on one process with one shared parameter."""
    made = tied_language_model(stages)
    made[-1].table.weight = made[0].table.weight
    whole = nn.Sequential(*made)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    norms = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 20, (2 * microbatches,), generator=generator)
        for part in (ids, ids.roll(1)):
            pairs = zip(part.chunk(microbatches), part.roll(3).chunk(microbatches), strict=True)
            for x, y in pairs:
                (torch.nn.functional.cross_entropy(whole(x), y) / microbatches).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    state = {f"{s}.{n}": p.detach() for s, m in enumerate(made) for n, p in m.named_parameters()}
    return {"norms": norms, "state": state}


class Keeps(Block):
    """Hands on memory that it keeps, or was given, and changes it at the next microbatch."""

    def __init__(self, kind: str, patience_s: float) -> None:
        super().__init__()
        self.kind, self.patience_s, self.kept = kind, patience_s, None
        self.register_buffer("buffer", torch.zeros(SIZE, WIDTH))

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, aside: torch.Tensor | None = None, given: torch.Tensor | None = None
    ) -> Any:
        time.sleep(self.patience_s)
        if aside is not None:
            x = x + aside.sum(0)
        memory = self.buffer
        if self.kind == "attribute":
            self.kept = torch.zeros(SIZE, WIDTH) if self.kept is None else self.kept
            memory = self.kept
        elif self.kind == "input":  # a new one each time, which the next microbatch changes
            memory, before = torch.zeros(SIZE, WIDTH), self.kept
            self.kept = memory
            if before is not None:
                before.zero_()
        elif self.kind == "given" and given is not None:
            memory = given
        with torch.no_grad():
            memory += x.detach().mean(0) + 1
        return super().forward(x), memory


SIZE = 30_000  # rows: more than the kernel's buffers hold, so that messages wait at their sender


def kept_memory(rank: int, kinds: list[str]) -> list[tuple[str, int]]:
    """Kinds and microbatches for which the last stage got something else than in one process."""
    return [(kind, m) for kind in kinds for m in _kept_memory(rank, kind)]


def _kept_memory(rank: int, kind: str) -> list[int]:
    schedule = make(("gpipe", 5, None), 2)
    torch.manual_seed(3)
    stages = [Keeps(kind, 0.0), Keeps("none", 0.03)]
    torch.manual_seed(3)
    twins = [Keeps(kind, 0.0), Keeps("none", 0.0)]
    pipe = pipeline(stages, schedule, rank, lambda output, target: mse(output[0], target))
    x, y = batch(10)
    wrong = []
    for _ in range(2):
        given = torch.zeros(SIZE, WIDTH)
        wanted = []
        for part in x.chunk(5):
            handed = twins[0](part, given=given.clone() if kind == "none" else given)
            wanted.append(twins[1](*handed)[0].detach())
        given = torch.zeros(SIZE, WIDTH)
        kwargs = {"given": [given] * 5} if rank == 0 else None
        result = pipe.step(x, y, kwargs=kwargs, return_outputs=True)
        if result.outputs is not None:
            wrong += [
                m
                for m, output in enumerate(result.outputs)
                if not torch.allclose(output[0], wanted[m], rtol=1e-6)
            ]
    return wrong
