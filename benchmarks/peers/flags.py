"""Cases 27 to 29: flags, partitions and reports, which torch may leave to its user."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from api import named_like
from bench import Bench
from torch.distributed.pipelining import ScheduleInterleaved1F1B
from words import Row, failure_of


def no_stages(rank: int, ranks: int) -> None:
    """v = 0: an interleaved schedule of no stages."""
    ScheduleInterleaved1F1B([], 4, loss_fn=None)


def case_27(bench: Bench) -> Iterator[Row]:
    """Flags that people type."""
    yield Row(tried="layers to stages", words=named_like("layer", "flag", "argparse"))
    yield Row(tried="v = 0", words=failure_of(bench.run(no_stages, 1)) or "no error")


def case_28(bench: Bench) -> Iterator[Row]:
    """Minimise the largest stage."""
    yield Row(tried="what a stage costs", words=named_like("cost", "balance", "partition"))
    yield Row(tried="where a model is cut", words=named_like("split_spec", "split_policy"))


def case_29(bench: Bench) -> Iterator[Row]:
    """Every rank priced by its own stages."""
    yield Row(words=named_like("memory", "estimate", "report"))


CASES: dict[int, Callable[[Bench], Iterator[Row]]] = {27: case_27, 28: case_28, 29: case_29}
