"""Cases 21 to 26: what is kept, what is waited for, what a split backward costs, what is seen."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from bench import Bench
from rig import (
    EVERY,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZBV,
    ZERO_BUBBLE,
    Block,
    Kind,
    M,
    Rig,
    batch,
    blocks,
    mse,
)
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from words import Row, failure_of


def receive_buffers(rank: int, ranks: int, kind: Kind, m: int) -> tuple[int, int]:
    """Receive buffers that a rank holds after a step: of activations, of gradients."""
    rig = Rig(rank, ranks, kind, m=m)
    rig.step(*batch(2 * m))
    return tuple(  # type: ignore[return-value]
        len(
            {
                info.buffer.data_ptr()
                for stage in rig.stages
                for infos in getattr(stage, table).values()
                for info in infos
                if info.buffer is not None
            }
        )
        for table in ("args_recv_info", "grad_recv_info")
    )


def case_21(bench: Bench) -> Iterator[Row]:
    """Receive buffers as M grows from 4 to 32: those of activations and of gradients of a rank."""
    for kind in EVERY:
        counts = {}
        for m in (4, 32):
            outcomes = bench.run(receive_buffers, 2, kind, m)
            if words := failure_of(outcomes):
                yield Row(under=kind.name, words=words)
                break
            counts[m] = [outcome.value for outcome in outcomes]
        else:
            said = [
                f"M={m}: " + ", ".join(f"{a} + {g} on rank {r}" for r, (a, g) in enumerate(each))
                for m, each in counts.items()
            ]
            yield Row(under=kind.name, words="; ".join(said))


def outputs_alive(rank: int, ranks: int, kind: Kind, keep: bool) -> tuple[int, int]:  # noqa: FBT001
    """Most outputs of the last stage alive when a loss is computed, and those after the step."""
    gc.disable()  # what dies, dies at once, not by the collector
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal most
        alive.add(output)
        most = max(most, len(alive))
        return mse(output, target)

    rig = Rig(rank, ranks, kind, m=2 * M, loss=loss)
    for seed in range(2):
        most = 0
        x, y = batch(4 * M, seed=seed)
        rig.step_unwatched(x, y, return_outputs=keep)
    return most, len(alive)


def case_22(bench: Bench) -> Iterator[Row]:
    """The last stage's outputs alive in a step of M = 8, and after it."""
    for keep in (True, False):
        tried = "as it is called by default" if keep else "return_outputs=False"
        for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE):
            outcomes = bench.run(outputs_alive, 2, kind, keep)
            words = failure_of(outcomes)
            if not words:
                most, after = outcomes[-1].value
                words = f"{most} of 8 at once, {after} after the step"
            yield Row(tried=tried, under=kind.name, words=words)


def outputs_before_their_backward(rank: int, ranks: int) -> tuple[int, int]:
    """GPipe: outputs that a rank has sent and still holds when its first backward begins."""
    alive: list[weakref.ref[torch.Tensor]] = []
    counts = []
    rig = Rig(rank, ranks, GPIPE)
    stage = rig.stages[0]
    rig.modules[rank].register_forward_hook(lambda *given: alive.append(weakref.ref(given[2])))
    backward = stage.backward_one_chunk

    def watched(*args: Any, **kwargs: Any) -> Any:
        counts.append(sum(output() is not None for output in alive))
        return backward(*args, **kwargs)

    stage.backward_one_chunk = watched  # type: ignore[method-assign]
    rig.step(*batch(2 * M))
    alive.clear()
    counts.clear()
    rig.step(*batch(2 * M, seed=1))
    return counts[0], counts[-1]


def case_23(bench: Bench) -> Iterator[Row]:
    """What a rank has sent and still holds as its backwards begin, GPipe, M = 4."""
    outcomes = bench.run(outputs_before_their_backward, 2)
    words = failure_of(outcomes)
    if not words:
        first, last = outcomes[0].value
        words = f"{first} of {M} outputs alive when the first backward begins, {last} at the last"
    yield Row(under=GPIPE.name, words=words)


SLOW_S = 0.3


class Slow(nn.Module):
    """Takes its time in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.seconds = Block(), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.block(x)  # type: ignore[no-any-return]


def ready_forwards(rank: int, ranks: int, kind: Kind) -> list[float]:
    """Seconds from the first forward of this rank to each of its first four; rank 1 is slow."""
    rig = Rig(rank, ranks, kind, blocks(kind.per_rank * ranks, Slow))
    rig.step(*batch(2 * M))
    begun: list[float] = []
    for stage, module in rig.modules.items():
        module.seconds = SLOW_S if stage == 1 else 0.0
    rig.modules[rank].register_forward_pre_hook(lambda *_: begun.append(time.monotonic()))
    rig.step(*batch(2 * M))
    return [at_s - begun[0] for at_s in begun[:M]]


def case_24(bench: Bench) -> Iterator[Row]:
    """Rank 0's four forwards, all ready at once, at P = 4; a forward of stage 1 takes 0.3 s."""
    for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE):
        outcomes = bench.run(ready_forwards, 4, kind)
        words = failure_of(outcomes)
        if not words:
            waits = outcomes[0].value[-1]
            words = f"the last of them begins after {waits:.1f} s"
        yield Row(under=kind.name, words=words)


def split_cost(rank: int, ranks: int, hidden: int) -> float:
    """(I + W) / whole backward of a transformer layer, the quickest of each; one thread."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(hidden, max(1, hidden // 64), 4 * hidden, dropout=0.0)
    x, gradient = torch.randn(2, 64, 1, hidden)
    wholes, halves = [], []
    for _ in range(60):
        wholes.append(_seconds(lambda out, leaf: out.backward(gradient), layer, x))
        halves.append(_seconds(lambda out, leaf: _halves(layer, out, leaf, gradient), layer, x))
    return min(halves) / min(wholes)


def _seconds(act: Callable[[Any, Any], object], layer: nn.Module, x: torch.Tensor) -> float:
    leaf = x.clone().requires_grad_()
    output = layer(leaf)
    begun_s = time.perf_counter()
    act(output, leaf)
    return time.perf_counter() - begun_s


def _halves(layer: nn.Module, output: Any, leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    _, groups = stage_backward_input([output], [gradient], [leaf], layer.parameters())
    stage_backward_weight(layer.parameters(), groups)


def case_25(bench: Bench) -> Iterator[Row]:
    """I + W of a transformer layer on 64 tokens, in whole backwards: the quickest of 60 each."""
    for hidden in (64, 384):
        outcomes = bench.run(split_cost, 1, hidden)
        words = failure_of(outcomes) or f"{outcomes[0].value:.2f} ×"
        yield Row(tried=f"{hidden} dimensions", words=words)


def not_a_number(rank: int, ranks: int, kind: Kind) -> tuple[list[float], bool]:
    """The losses that this rank is told of, and whether its gradients are numbers."""
    rig = Rig(rank, ranks, kind)
    x, y = batch(2 * M)
    y[0, 0] = float("nan")
    losses = rig.step(x, y)
    gradients, _ = rig.gradients()
    return [float(loss) for loss in losses], all(
        bool(g.isfinite().all()) for g in gradients.values()
    )


def case_26(bench: Bench) -> Iterator[Row]:
    """Not a number in the loss of one microbatch: what step() tells each rank."""
    for kind in (ONE_F_ONE_B, INTERLEAVED, ZBV):
        outcomes = bench.run(not_a_number, 2, kind)
        words = failure_of(outcomes) or "; ".join(
            f"rank {rank} {_told(*outcome.value)}" for rank, outcome in enumerate(outcomes)
        )
        yield Row(under=kind.name, words=words)


def _told(losses: Sequence[float], finite: bool) -> str:  # noqa: FBT001
    seen = (
        "no losses" if not losses else f"{sum(n != n for n in losses)} NaN of {len(losses)} losses"
    )
    return f"{seen}, its gradients {'finite' if finite else 'NaN'}"


CASES: dict[int, Callable[[Bench], Iterator[Row]]] = {
    21: case_21,
    22: case_22,
    23: case_23,
    24: case_24,
    25: case_25,
    26: case_26,
}
