"""What this machine reaches: matrix products, copies in memory, messages between ranks.

Every rank measures products and copies at the same time, as it would train, with its share of the
cores; times are medians over tries, and what ranks found is averaged. Messages are then sent there
and back between rank 0 and one other, and summed by all; of these the quickest try counts.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from fullbore.cost.hardware.calibration import Measured, MeasuredProduct
from fullbore.train.place import RankPlace, cores_here, device_for, joined
from fullbore.train.team import Team

__all__ = ["Effort", "Plan", "calibrate_on_rank", "neighbourhood"]

Shape = tuple[int, int, int]  # rows, inner, columns

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SMALL_BYTES = 1024
_SMALL_TRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured.

    shapes: of products, small ones first; longest_s: one that takes longer ends the row.
    copied_bytes: of one copy. message_bytes: of a large message. tries: of each.
    """

    shapes: tuple[Shape, ...]
    longest_s: float
    copied_bytes: int
    message_bytes: int
    tries: int

    @staticmethod
    def of(*, gpu: bool, quick: bool) -> Effort:
        """A few seconds where quick, else up to a minute or two."""
        sizes = (512, 1024, 2048, 4096, 8192) if gpu else (64, 128, 256, 512, 1024)
        return Effort(
            shapes=_shapes(sizes[:3] if quick else sizes),
            longest_s=0.1 if quick else 0.5,
            copied_bytes=2**30 if gpu else 2 ** (25 if quick else 28),
            message_bytes=2 ** (26 if gpu else 22 if quick else 24),
            tries=3 if quick else 7,
        )


def _shapes(sizes: Sequence[int]) -> tuple[Shape, ...]:
    """Square products, and those of layers: few tokens, an MLP's widths, a short inner side."""
    found = {shape for size in sizes for shape in _around(size)}
    return tuple(sorted(found, key=lambda shape: shape[0] * shape[1] * shape[2]))


def _around(size: int) -> tuple[Shape, ...]:
    return (
        (size, size, size),
        (size, size, 4 * size),
        (size, 4 * size, size),
        (size, size // 8, size),
        (size // 8, size, size),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """ranks: of the job. device: auto, cpu or cuda. threads: of a rank, None for its share of the
    cores. precision: None for bf16 on a GPU and fp32 elsewhere.
    """

    ranks: int = 2
    device: str = "auto"
    threads: int | None = None
    precision: str | None = None
    quick: bool = False


def calibrate_on_rank(
    plan: Plan, place: RankPlace, *, report: Callable[[str], None]
) -> Measured | None:
    """Measure as one rank of the plan; what was found, on rank 0 alone.

    report: hears what is being measured, on rank 0. Raises FullboreError.
    """
    device = device_for(place, plan.device)
    torch.set_num_threads(plan.threads or max(1, cores_here() // place.local_size))
    effort = Effort.of(gpu=device.type == "cuda", quick=plan.quick)
    with joined(place, device, ranks=plan.ranks) as team:
        machine = _Machine(
            team=team, device=device, effort=effort, report=report if team.leads else _silent
        )
        found = _measure(machine, _precision(plan, device))
    return found if place.rank == 0 else None


def _silent(_: str) -> None:
    return None


def _precision(plan: Plan, device: torch.device) -> str:
    return plan.precision or ("bf16" if device.type == "cuda" else "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """This rank among the others, and how hard to try."""

    team: Team
    device: torch.device
    effort: Effort
    report: Callable[[str], None]

    def median_s(self, work: Callable[[], object]) -> float:
        """Median over tries of this rank's seconds, after one that warms up."""
        return statistics.median(self._times_s(work, self.effort.tries))

    def least_s(self, work: Callable[[], object], tries: int) -> float:
        """The shortest of so many tries: of a message, what nobody else delayed."""
        return min(self._times_s(work, tries))

    def _times_s(self, work: Callable[[], object], tries: int) -> list[float]:
        return [self.once_s(work) for _ in range(tries + 1)][1:]

    def once_s(self, work: Callable[[], object]) -> float:
        """Seconds of one try."""
        self.wait()
        start_s = time.perf_counter()
        work()
        self.wait()
        return max(time.perf_counter() - start_s, 1e-9)

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mean(self, value: float) -> float:
        """The mean of all ranks' values."""
        return statistics.fmean(self.team.gather(value))

    def tensor(self, elements: int) -> torch.Tensor:
        """A tensor of so many floats."""
        return torch.ones(elements, device=self.device)


def _measure(machine: _Machine, precision: str) -> Measured:
    products = _products(machine, precision)
    copy = _copy_bytes_per_s(machine)
    host = _host_bytes_per_s(machine, otherwise=copy)
    near, far = _neighbours(machine)
    hop, pair = _messages(machine, near, "within the machine")
    network_hop, network = _messages(machine, far, "to another machine")
    small, large = _all_reduces(machine)
    dtype = _DTYPES[precision]
    return Measured(
        device=_name(machine.device),
        is_gpu=machine.device.type == "cuda",
        precision=precision,
        element_bytes=float(dtype.itemsize),
        multiprocessors=_multiprocessors(machine.device),
        ranks=machine.team.size,
        ranks_per_node=machine.team.local_size,
        memory_bytes=_memory_bytes(machine),
        products=products,
        peaks={precision: max(product.flop_per_s for product in products)},
        copy_bytes_per_s=copy,
        host_bytes_per_s=host,
        hop_s=hop,
        pair_bytes_per_s=pair,
        network_hop_s=network_hop,
        network_bytes_per_s=network,
        reduced_bytes=None if large is None else float(machine.effort.message_bytes),
        all_reduce_s=large,
        small_all_reduce_s=small,
    )


def _products(machine: _Machine, precision: str) -> tuple[MeasuredProduct, ...]:
    """Each shape's seconds; it ends with the first that takes too long on any rank."""
    found: list[MeasuredProduct] = []
    for rows, inner, columns in machine.effort.shapes:
        machine.report(f"products: [{rows}, {inner}] x [{inner}, {columns}]")
        seconds = machine.mean(_product_s(machine, (rows, inner, columns), precision))
        found.append(MeasuredProduct(rows=rows, inner=inner, columns=columns, seconds=seconds))
        if seconds > machine.effort.longest_s:
            break
    return tuple(found)


def _product_s(machine: _Machine, shape: Shape, precision: str) -> float:
    rows, inner, columns = shape
    left = torch.rand(rows, inner, device=machine.device).to(_DTYPES[precision])
    right = torch.rand(inner, columns, device=machine.device).to(_DTYPES[precision])
    out = torch.empty(rows, columns, device=machine.device, dtype=left.dtype)
    return machine.median_s(lambda: torch.mm(left, right, out=out))


def _copy_bytes_per_s(machine: _Machine) -> float:
    """Bytes read and written together."""
    machine.report("copies in memory")
    source = machine.tensor(machine.effort.copied_bytes // 4)
    target = torch.empty_like(source)
    return machine.mean(2 * source.nbytes / machine.median_s(lambda: target.copy_(source)))


def _host_bytes_per_s(machine: _Machine, *, otherwise: float) -> float:
    """One way between a GPU and pinned memory; a CPU's host memory is its own."""
    if machine.device.type != "cuda":
        return otherwise / 2
    machine.report("copies to the host")
    source = machine.tensor(machine.effort.copied_bytes // 16)
    target = torch.empty(source.shape, pin_memory=True)
    seconds = machine.median_s(lambda: target.copy_(source, non_blocking=True))
    return machine.mean(source.nbytes / seconds)


def _neighbours(machine: _Machine) -> tuple[int | None, int | None]:
    """The first other rank on rank 0's machine, and the first on another machine."""
    hosts = machine.team.gather(socket.gethostname())
    near = next((rank for rank, host in enumerate(hosts) if rank and host == hosts[0]), None)
    far = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    return near, far


def _messages(
    machine: _Machine, other: int | None, where: str
) -> tuple[float | None, float | None]:
    """Latency of a message between rank 0 and another, and bytes a second of a large one."""
    if other is None:
        return None, None
    machine.report(f"messages {where}")
    times = [
        _one_way_s(machine, other, size) for size in (_SMALL_BYTES, machine.effort.message_bytes)
    ]
    small_s, large_s = (machine.team.gather(seconds)[0] for seconds in times)
    moving_s = large_s - small_s if large_s > 2 * small_s else large_s
    return small_s, machine.effort.message_bytes / moving_s


def _one_way_s(machine: _Machine, other: int, size_bytes: int) -> float:
    """Half of there and back, on both ranks; 0 on the others."""
    rank = machine.team.rank
    if rank not in (0, other):
        return 0.0
    tensor, peer = machine.tensor(size_bytes // 4), other if rank == 0 else 0

    def there_and_back() -> None:
        for turn in (0, other):
            (dist.send if turn == rank else dist.recv)(tensor, peer)

    return machine.least_s(there_and_back, _message_tries(machine, size_bytes)) / 2


def _all_reduces(machine: _Machine) -> tuple[float | None, float | None]:
    """Seconds of an all_reduce of few and of many bytes, over the ranks of each machine."""
    if machine.team.local_size == 1:
        return None, None
    machine.report("sums over all ranks of a machine")
    group = neighbourhood(machine.team.gather(socket.gethostname()), machine.team.rank)
    small, large = (
        machine.mean(_all_reduce_s(machine, size, group))
        for size in (_SMALL_BYTES, machine.effort.message_bytes)
    )
    return small, large


def neighbourhood(hosts: Sequence[str], rank: int) -> dist.ProcessGroup | None:
    """The ranks of this one's machine, None where there is only one machine.

    hosts: of all ranks, all of which must call this.
    """
    names = list(dict.fromkeys(hosts))
    if len(names) == 1:
        return None
    groups: dict[str, dist.ProcessGroup] = {
        name: dist.new_group([other for other, host in enumerate(hosts) if host == name])
        for name in names
    }
    return groups[hosts[rank]]


def _all_reduce_s(machine: _Machine, size_bytes: int, group: dist.ProcessGroup | None) -> float:
    tensor = machine.tensor(size_bytes // 4)
    return machine.least_s(
        lambda: dist.all_reduce(tensor, group=group), _message_tries(machine, size_bytes)
    )


def _message_tries(machine: _Machine, size_bytes: int) -> int:
    """Small messages are quick, and more easily disturbed."""
    return _SMALL_TRIES if size_bytes == _SMALL_BYTES else machine.effort.tries


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu()}, {threads} thread{'' if threads == 1 else 's'}"


def _cpu() -> str:
    """The processor's name as Linux tells it, or its kind."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line)
    return next(names, None) or f"CPU {platform.machine()}"


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


def _memory_bytes(machine: _Machine) -> float:
    """Of a GPU, or this rank's share of the machine's."""
    if machine.device.type == "cuda":
        return float(torch.cuda.get_device_properties(machine.device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / machine.team.local_size
