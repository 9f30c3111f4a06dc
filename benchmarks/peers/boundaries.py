"""Case 16: what stages hand on, of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from bench import Bench
from odd_outputs import (
    Beside,
    Dict,
    InPlace,
    NoneBeside,
    Shift,
    Strided,
    Tuple,
    Turned,
    View,
    loss_by_sum,
    loss_of_first,
)
from rig import ONE_F_ONE_B, ZERO_BUBBLE, Kind, M, Rig, batch, blocks, one_step
from words import Row, judge

MODULES: dict[str, Callable[[], Any]] = {
    "tuple": Tuple,
    "dict": Dict,
    "None in a tuple": NoneBeside,
    "integer ids": partial(Beside, torch.int64),
    "a mask": partial(Beside, torch.bool),
    "a float tensor without gradient": partial(Beside, torch.float32),
    "a view": View,
    "a strided output": Strided,
    "in-place first operation": InPlace,
    "a gradient with strides of 0 (the loss ends in sum)": Shift,
    "a transposed gradient": Turned,
}


def handed_on(rank: int, ranks: int, kind: Kind, what: str) -> Any:
    modules = blocks(kind.per_rank * ranks, MODULES[what])
    loss = loss_by_sum if MODULES[what] is Shift else loss_of_first
    return one_step(Rig(rank, ranks, kind, modules, loss=loss), *batch(2 * M))


def case_16(bench: Bench) -> Iterator[Row]:
    """What stages hand on."""
    for what in MODULES:
        for kind in (ONE_F_ONE_B, ZERO_BUBBLE):
            words = judge(bench.run(handed_on, 2, kind, what, limit_s=6))
            yield Row(tried=what, under=kind.name, words=words)


CASES: dict[int, Callable[[Bench], Iterator[Row]]] = {16: case_16}
