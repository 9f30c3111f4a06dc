"""Links: one process group for each directed pair of ranks, first in, first out.

A pair of ranks that talks both ways has two links, so the two directions never queue behind each
other, and NCCL, which runs the operations of a communicator in the order of issue, needs no tags.

Receives are posted ahead, but only `window` messages of them: each posted receive owns its
buffers, which become the stage's input themselves and are never copied. A sent tensor is kept
until its send is known to have completed; nobody waits for that before computing.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from fullbore.runtime.control import PeerLostError, is_of_a_connection
from fullbore.runtime.device import Group, Side
from fullbore.runtime.layout import Layout

__all__ = ["IncomingLink", "Message", "OutgoingLink"]

SENDER, RECEIVER = 0, 1  # ranks within a link's group
_TAG = 0

Tensors = list[torch.Tensor | None]
Message = tuple[Layout, Tensors]


class OutgoingLink:
    """The sending end of the link to rank `peer`, which messages call `number`."""

    def __init__(self, *, group: Group, peer: int, number: int, side: Side) -> None:
        self.peer, self._number, self._group, self._side = peer, number, group, side
        self._keeper = side.keeper()

    def expect(self, taken: Sequence[int], *, window: int) -> None:
        """Begin a step. taken: for each of its messages, how many before it the peer has surely
        taken when it is sent (see `verify.LinkUse`). window: how many receives the peer posts.
        """
        self._keeper.begin(taken, window=window)

    def send(self, tensors: Sequence[torch.Tensor | None], *, blocking: bool) -> None:
        """Send one message, whose layout the receiver knows (None and empty tensors take no
        part); returns at once, or if `blocking` when it has left.
        """
        works: list[dist.Work] = []
        kept: list[torch.Tensor] = []
        try:
            with self._side.sending():
                for tensor in tensors:
                    if tensor is not None and tensor.numel():
                        whole = tensor.detach()
                        if not whole.is_contiguous():
                            whole = whole.contiguous()
                        works.append(self._group.send([whole], RECEIVER, _TAG))
                        kept.append(whole)
            if blocking:
                for work in works:
                    work.wait()
                works = []  # gloo would wait for another message if asked again
            self._keeper.keep(works, kept)
        except RuntimeError as error:
            _blame(error, self._number)

    def send_described(self, layout: Layout, tensors: Sequence[torch.Tensor | None]) -> None:
        """Send one message with its layout ahead of it.

        Returns at once: the receiver posts nothing for a message that it does not know, so to
        wait here could be a deadlock.
        """
        self.send([*_header(layout, self._side.device), *tensors], blocking=False)

    def returned(self, count: int) -> None:
        """Something has arrived that proves the first `count` messages of the step to be taken."""
        self._keeper.returned(count)

    def finish(self) -> None:
        """The step is over everywhere: every message has been taken."""
        self._keeper.finish()

    def close(self) -> None:
        """No more messages; what is on its way still leaves."""
        self._keeper.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._side.abort(self._group)
        self._keeper.close()


def _header(layout: Layout, device: torch.device) -> list[torch.Tensor]:
    """A layout as two tensors: its length in bytes, then its bytes."""
    body = torch.frombuffer(bytearray(pickle.dumps(layout)), dtype=torch.uint8)
    return [torch.tensor([len(body)], device=device), body.to(device)]


class IncomingLink:
    """The receiving end of the link from rank `peer`, which messages call `number`."""

    def __init__(self, *, group: Group, peer: int, number: int, side: Side) -> None:
        self.peer, self._number, self._group, self._side = peer, number, group, side
        self._expected: deque[Layout | None] = deque()
        self._posted: deque[_Posted] = deque()
        self._window = 1
        self.posted_peak = 0  # most messages posted at once, since the link was made

    def expect(self, layouts: Sequence[Layout | None], *, window: int) -> None:
        """Announce the messages of a step, in order (None: it describes itself)."""
        self._expected.extend(layouts)
        self._window = window
        try:
            self._post()
        except RuntimeError as error:
            _blame(error, self._number)

    def take(self) -> Message:
        """Wait for the next message; the next receive is posted behind it."""
        try:
            layout, tensors, works = self._posted.popleft()
            for work in works:
                work.wait()
            if layout is None:
                layout, tensors = self._take_described(tensors)
            self._side.received(tensors)
            self._post()
        except RuntimeError as error:
            _blame(error, self._number)
        return layout, tensors

    def abort(self) -> None:
        """Close the connection at once."""
        self._side.abort(self._group)

    def _post(self) -> None:
        while self._expected and len(self._posted) < self._window:
            if self._posted and self._posted[-1][0] is None:
                break  # nothing goes behind a message of unknown size
            layout = self._expected.popleft()
            with self._side.receiving():
                self._posted.append(self._post_one(layout))
            self.posted_peak = max(self.posted_peak, len(self._posted))

    def _post_one(self, layout: Layout | None) -> _Posted:
        if layout is None:
            length = torch.zeros(1, dtype=torch.int64, device=self._side.device)
            return None, [length], [self._receive(length)]
        return layout, *self._receive_all(layout)

    def _take_described(self, length: Tensors) -> Message:
        """The rest of a message that describes itself."""
        assert length[0] is not None
        size = int(length[0].item())
        with self._side.receiving():
            body = torch.empty(size, dtype=torch.uint8, device=self._side.device)
            self._receive(body).wait()  # the receive stream waits, then the copy to the host does
            layout: Layout = pickle.loads(body.cpu().numpy().tobytes())
            tensors, works = self._receive_all(layout)
        for work in works:
            work.wait()
        return layout, tensors

    def _receive_all(self, layout: Layout) -> tuple[Tensors, list[dist.Work]]:
        device = self._side.device
        tensors: Tensors = [
            None
            if t is None
            else torch.empty(t.shape, dtype=t.dtype, device=device, requires_grad=t.requires_grad)
            for t in layout.tensors
        ]
        return tensors, [self._receive(t) for t in tensors if t is not None and t.numel()]

    def _receive(self, tensor: torch.Tensor) -> dist.Work:
        return self._group.recv([tensor], SENDER, _TAG)


_Posted = tuple[Layout | None, Tensors, list[dist.Work]]


def _blame(error: RuntimeError, number: int) -> NoReturn:
    """Raise what broke the connection to a rank as its loss, and anything else as it is."""
    if is_of_a_connection(error):
        raise PeerLostError([number], str(error)) from error
    raise error
