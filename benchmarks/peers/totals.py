"""Cases 9 to 12: what is a sum over ranks or microbatches: tied weights, norms, losses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from api import named_like
from bench import Bench
from models import (
    CLASSES,
    IGNORED,
    Head,
    TiedModel,
    mean_of_labelled,
    share_of_labelled,
)
from rig import EVERY, GPIPE, INTERLEAVED, ONE_F_ONE_B, WIDTH, Kind, M, Rig, batch, blocks
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from tqdm import tqdm
from words import Row, difference, failure_of, judge


def tied_by_tracing(rank: int, ranks: int) -> Any:
    """The gradient of this rank's copy of the table, and that of the one table in one process."""
    tqdm.set_lock(threading.RLock())  # or the traced model's would outlive a process that is killed
    torch.manual_seed(1)
    model = TiedModel()
    torch.manual_seed(1)
    twin = TiedModel()
    ids = torch.arange(2 * M) % CLASSES
    labels = ids.roll(3)
    for part, wanted in zip(ids.chunk(M), labels.chunk(M), strict=True):
        (nn.functional.cross_entropy(twin(part), wanted) / M).backward()
    pipe = pipeline(model, (ids[:2],), split_spec={"second": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = GPIPE.build([stage], M, nn.functional.cross_entropy)
    schedule.step(ids) if rank == 0 else schedule.step(target=labels)
    tables = [p for p in stage.submod.parameters() if p.shape == (CLASSES, WIDTH)]
    (gradient,) = [p.grad for p in tables if p.grad is not None]
    return gradient, twin.table.weight.grad


def case_9(bench: Bench) -> Iterator[Row]:
    """One table in the first and the last stage."""
    offered = named_like("tied", "shared", "multi_use")
    outcomes = bench.run(tied_by_tracing, 2, limit_s=18)
    words = failure_of(outcomes)
    if not words:
        (first, whole), (last, _) = (outcome.value for outcome in outcomes)
        parts = [difference({"0.table": copy}, {"0.table": whole}) for copy in (first, last)]
        sums = difference({"0.table": first + last}, {"0.table": whole})
        words = f"first copy {parts[0]}; last copy {parts[1]}; their sum {sums}"
    yield Row(tried="PipelineStage", words=offered)
    yield Row(tried="pipeline(), a traced model", words=words)


def own_norm(rank: int, ranks: int, kind: Kind) -> Any:
    """The norm that clip_grad_norm_ finds on this rank, and on one process."""
    rig = Rig(rank, ranks, kind)
    x, y = batch(2 * M)
    rig.alone(rig.cut(x), rig.cut(y))
    rig.step(x, y)
    mine = [p for module in rig.modules.values() for p in module.parameters()]
    every = [p for twin in rig.twins for p in twin.parameters()]
    return tuple(float(nn.utils.clip_grad_norm_(some, 0.05)) for some in (mine, every))


def case_10(bench: Bench) -> Iterator[Row]:
    """Clipping by the norm of the whole gradient."""
    outcomes = bench.run(own_norm, 2, ONE_F_ONE_B)
    words = failure_of(outcomes)
    if not words:
        own = " and ".join(f"{outcome.value[0]:.3f}" for outcome in outcomes)
        words = f"each rank's own norm, {own}, where one process has {outcomes[0].value[1]:.3f}"
    yield Row(tried="pipelining", words=named_like("clip", "norm"))
    yield Row(tried="torch's clip_grad_norm_ on each rank", words=words)


def unequal_labels(rank: int, ranks: int, kind: Kind, shared: bool) -> Any:  # noqa: FBT001
    """The mean over all labels of a batch whose microbatches have 1, 2, 3 and 4 of them."""
    modules = [*blocks(kind.per_rank * ranks - 1), Head()]
    torch.manual_seed(2)
    x = torch.randn(4 * M, WIDTH)
    labels = torch.randint(0, CLASSES, (M, 4))
    for i in range(M):
        labels[i, i + 1 :] = IGNORED
    labels = labels.flatten()
    for p in modules[-1].parameters():
        nn.init.normal_(p, std=0.3)
    options = {"loss": share_of_labelled if shared else mean_of_labelled}
    rig = Rig(rank, ranks, kind, modules, **options)  # type: ignore[arg-type]
    share_of_labelled(rig.chain(x), labels, total=10).backward()
    if shared:
        rig.schedule.scale_grads = False  # the loss has its share already
    rig.step(x, labels, **({"loss_kwargs": {"total": 10}} if shared else {}))
    return rig.gradients()


def case_11(bench: Bench) -> Iterator[Row]:
    """Microbatches with unequal numbers of labels, against the mean over all labels."""
    for shared in (False, True):
        tried = (
            "a loss divided by loss_kwargs' total, scale_grads=False"
            if shared
            else "a mean loss, scale_grads as it is by default"
        )
        for kind in EVERY:
            words = judge(bench.run(unequal_labels, 2, kind, shared))
            yield Row(tried=tried, under=kind.name, words=words)


LAYERS = 8
MICROBATCHES = (1, 2, 8)


def sgd(rank: int, ranks: int, kind: Kind, ms: Sequence[int]) -> Any:
    """Weights after three steps of SGD, for each M, beside those of one process."""
    found: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for m in ms:
        count = kind.per_rank * ranks
        layers = blocks(LAYERS)
        each = LAYERS // count
        modules = [nn.Sequential(*layers[s * each : (s + 1) * each]) for s in range(count)]
        rig = Rig(rank, ranks, kind, modules, m=m)
        _three_steps(rig)
        for s, module in rig.modules.items():
            found |= {f"{s}.{m}.{n}": p.detach() for n, p in module.named_parameters()}
            expected |= {f"{s}.{m}.{n}": p.detach() for n, p in rig.twins[s].named_parameters()}
    return found, expected


def _three_steps(rig: Rig) -> None:
    mine = [p for module in rig.modules.values() for p in module.parameters()]
    every = [p for twin in rig.twins for p in twin.parameters()]
    optimizers = [torch.optim.SGD(some, lr=0.1) for some in (mine, every)]
    for step in range(3):
        rig.zero_grad()
        x, y = batch(16, seed=step)
        rig.loss(rig.chain(x), y).backward()  # the whole batch at once
        rig.step(x, y)
        for optimizer in optimizers:
            optimizer.step()


def case_12(bench: Bench) -> Iterator[Row]:
    """SGD at P = 1, 2, 4 and M = 1, 2, 8."""
    for ranks in (1, 2, 4):
        for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED):
            ms = [m for m in MICROBATCHES if m >= ranks or kind is not ONE_F_ONE_B]
            words = judge(bench.run(sgd, ranks, kind, ms))
            under = f"{kind.name} P={ranks} M={','.join(map(str, ms))}"
            yield Row(under=under, words=words)


CASES: dict[int, Callable[[Bench], Iterator[Row]]] = {
    9: case_9,
    10: case_10,
    11: case_11,
    12: case_12,
}
