"""Jobs run by two real ranks on one link."""

from __future__ import annotations

import time
import weakref
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from fullbore.runtime.device import CpuSide
from fullbore.runtime.layout import flatten
from fullbore.runtime.links import IncomingLink, OutgoingLink

SIZE = 1 << 20  # more than any socket buffers at once


def _ends(rank: int) -> tuple[CpuSide, dist.Store, OutgoingLink | IncomingLink]:
    store, side = dist.distributed_c10d._get_default_store(), CpuSide()
    group = side.make_group(
        dist.PrefixStore("a link", store), rank=rank, size=2, timeout=timedelta(seconds=30)
    )
    if rank == 0:
        return side, store, OutgoingLink(group=group, peer=1, number=1, side=side)
    return side, store, IncomingLink(group=group, peer=0, number=0, side=side)


def _wait_until(condition: object, limit_s: float = 20.0) -> bool:
    assert callable(condition)
    deadline_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return bool(condition())


def a_sent_tensor_lives_until_it_has_left(rank: int, window: int) -> list[bool]:
    """Rank 1 posts no receive until told: the tensor must be kept until then, and not after.

    window 0: the tensor is handed to the thread at once; 1: the next send lets go of it.
    """
    _, store, link = _ends(rank)
    if rank == 1:
        assert isinstance(link, IncomingLink)
        store.wait(["still kept"])
        layout, _ = flatten(torch.empty(SIZE))
        link.expect([layout], window=1)
        _, tensors = link.take()
        assert tensors[0] is not None
        right = bool((tensors[0] == 7).all())
        store.set("taken", "1")
        dist.barrier()
        return [right]
    assert isinstance(link, OutgoingLink)
    memory = np.full(SIZE, 7.0, dtype=np.float32)
    died = weakref.ref(memory)  # dies with the last tensor on this memory
    link.expect([0, 1], window=window)
    link.send([torch.from_numpy(memory)], blocking=False)
    del memory
    time.sleep(0.3)
    kept = died() is not None
    store.set("still kept", "1")
    if window:
        store.wait(["taken"])
        link.send([torch.zeros(1)], blocking=False)
    gone = _wait_until(lambda: died() is None)
    dist.barrier()
    return [kept, gone]


def at_most_a_window_is_posted(rank: int, messages: int, window: int) -> list[int]:
    """Messages arrive in order, and no more than the window is posted at once."""
    _, _, link = _ends(rank)
    layout, _ = flatten(torch.empty(4))
    if rank == 0:
        assert isinstance(link, OutgoingLink)
        link.expect([0] * messages, window=window)
        for number in range(messages):
            tensors = [torch.full((4,), float(number))]
            if number % 5 == 0:
                link.send_described(layout, tensors)
            else:
                link.send(tensors, blocking=False)
        dist.barrier()  # the process must not end before all has left
        return []
    assert isinstance(link, IncomingLink)
    link.expect([None if n % 5 == 0 else layout for n in range(messages)], window=window)
    taken = [link.take() for _ in range(messages)]
    dist.barrier()
    assert [float(tensors[0][0]) for _, tensors in taken] == list(range(messages))  # type: ignore
    return [link.posted_peak]


def a_group_is_closed_to_all_even_behind_a_closed_peer(rank: int) -> str:
    """Of three ranks, 2 closes, then 1, while 0 waits for 1; gives what 0 is told, and no later
    than in 5 s.
    """
    store, side = dist.distributed_c10d._get_default_store(), CpuSide()
    group = side.make_group(
        dist.PrefixStore("three", store), rank=rank, size=3, timeout=timedelta(seconds=30)
    )
    if rank == 0:
        begun_s = time.monotonic()
        try:
            group.recv([torch.empty(1)], 1, 0).wait()
        except RuntimeError:
            store.set("0 is done", "1")
            return "closed" if time.monotonic() - begun_s < 5 else "closed late"
        return "received"
    if rank == 2:
        side.abort(group)
        store.set("2 is closed", "1")
    else:
        store.wait(["2 is closed"])
        side.abort(group)
    store.wait(["0 is done"])
    return ""
