"""What the pieces of a model cost under one spread, as arrays that stages are summed from.

Items are what a pipeline is cut from: the embedding, L layers, the head. The price of an item does
not depend on where it is cut, so it is worked out once for each way in which layers are split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fullbore.cost.hardware import Layout, Priced, Roofline
from fullbore.cost.model import Piece, Recompute
from fullbore.cost.model.layer import pieces
from fullbore.plan.choice import NONE, Spread
from fullbore.plan.question import Question

__all__ = ["Prices", "Row", "StageSums", "layout_of", "message_bytes", "prices_of"]

Floats = npt.NDArray[np.float64]

_FULL = Recompute(granularity="full")
_LOGITS, _LAST, _LOGITS_GRAD = "logits", ("final norm", "targets"), "logits output gradient"


class Row(IntEnum):
    """What an item has: seconds, bytes and parameters, for one microbatch on one rank.

    I includes RECOMPUTE_S, all of what is made again, with its messages and its waits for the host.
    Of the rest F, I and W include EXPOSED_S, messages within the stage that nothing hides, and
    HOST_S, by how much the host is behind. KEPT is held from F to the backward, HELD
    between I and W. LOGITS is the part of KEPT that the loss keeps, SCRATCH what exists only while
    the backward of an item runs, LOGITS_SCRATCH the part of it that is the logits' gradient. TIED:
    parameters that are the embedding's again.
    """

    F = 0
    I = 1  # noqa: E741 - as the action is called
    W = 2
    RECOMPUTE_S = 3
    EXPOSED_S = 4
    KEPT = 5
    HELD = 6
    LOGITS = 7
    DENSE = 8
    EXPERT = 9
    TIED = 10
    SCRATCH = 11
    LOGITS_SCRATCH = 12
    HOST_S = 13


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSums:
    """Sums over the items of each stage: rows [len(Row), S]; of scratch the largest instead.

    seconds: of F, B, I and W [4, S]. rise, change: how far what is held rises while an action runs,
    and what it leaves, bytes [4, S], as `Rehearsal.levels` has them.
    """

    rows: Floats
    seconds: Floats
    rise: Floats
    change: Floats

    @staticmethod
    def of(rows: Floats) -> StageSums:
        """With all tables made."""
        kept, held, scratch = rows[Row.KEPT], rows[Row.HELD], rows[Row.SCRATCH]
        seconds, rise, change = np.zeros((3, 4, rows.shape[1]))
        seconds[0], seconds[2], seconds[3] = rows[Row.F], rows[Row.I], rows[Row.W]
        seconds[1] = seconds[2] + seconds[3]
        rise[0], rise[1], rise[2] = kept, scratch, np.maximum(scratch, held - kept)
        change[0], change[1], change[2], change[3] = kept, -kept, held - kept, -held
        return StageSums(rows=rows, seconds=seconds, rise=rise, change=change)

    def __getitem__(self, row: Row) -> Floats:
        return np.asarray(self.rows[row])


class Prices:
    """Tables of items [len(Row), L + 2], one a recomputation, each priced when it is asked for.

    table: makes one. message_bytes: between two stages, one microbatch, one way.
    """

    def __init__(self, table: Callable[[Recompute], Floats], *, message_bytes: float) -> None:
        self.message_bytes = message_bytes
        self._table = table
        self._tables: dict[Recompute, Floats] = {}

    @property
    def layers(self) -> int:
        """L."""
        return int(self.items(NONE).shape[1]) - 2

    def sums(self, layers: Sequence[int], recompute: Recompute) -> StageSums:
        """Stages of these many layers each [S]; the embedding first, the head last."""
        ends = np.concatenate([[0], np.cumsum(layers)]) + 1
        starts = ends[:-1].copy()
        starts[0] = 0
        items = self._items(ends, recompute)
        rows = np.add.reduceat(items, starts, axis=1)
        for row in (Row.SCRATCH, Row.LOGITS_SCRATCH):
            rows[row] = np.maximum.reduceat(items[row], starts)
        if 0 in layers[1:-1]:  # a stage without a layer has nothing
            rows[:, :-1][:, starts[:-1] == starts[1:]] = 0.0
        return StageSums.of(rows)

    def costs(self, recompute: Recompute) -> Floats:
        """Seconds of F, I and W of each item together [L + 2]."""
        table = self.items(recompute)
        return np.asarray(table[Row.F] + table[Row.I] + table[Row.W])

    def least_kept(self, recompute: Recompute) -> float:
        """The least share of what any item keeps that it still keeps under a recomputation."""
        plain, made = (self.items(what)[Row.KEPT] for what in (NONE, recompute))
        return float((made[1:-1] / plain[1:-1]).min())

    def _items(self, ends: npt.NDArray[np.int64], recompute: Recompute) -> Floats:
        """All items; ends - 1: how many layers stand before each stage, and L."""
        if recompute.layers is None:
            return self.items(recompute)
        again = np.zeros(self.layers + 2, dtype=np.bool_)
        for start, end in pairwise(ends.tolist()):
            again[start : min(start + recompute.layers, end)] = True
        return np.where(again, self.items(_FULL), self.items(NONE))

    def items(self, recompute: Recompute) -> Floats:
        """Items [len(Row), L + 2]; where only some layers of a stage are made again, with none."""
        whole = recompute if recompute.layers is None else NONE
        if whole not in self._tables:
            self._tables[whole] = self._table(whole)
        return self._tables[whole]


def layout_of(question: Question, spread: Spread) -> Layout:
    """Where the ranks of a spread are on the cluster; ConfigError where they do not fit."""
    return Layout(
        cluster=question.cluster,
        tensor=spread.tensor,
        context=spread.context,
        expert=spread.expert,
        data=spread.data,
        pipeline=spread.pipeline,
        expert_tensor=spread.expert_tensor,
    )


def prices_of(question: Question, spread: Spread) -> Prices:
    """Price the model under a spread; ConfigError where the spread does not divide it."""
    roofline = Roofline(
        layout=layout_of(question, spread),
        precision=question.precision,
        kernels=question.kernels,
        overlap=question.overlap,
        capture=question.capture,
    )
    plain = _pieces(question, spread, NONE)

    def table(recompute: Recompute) -> Floats:
        made = plain if recompute == NONE else _pieces(question, spread, recompute)
        return _rows(plain, made, roofline)

    return Prices(table, message_bytes=message_bytes(question, spread))


def message_bytes(question: Question, spread: Spread) -> float:
    """2·s·b·h in 16 bits, over the ranks that share the sequence."""
    shared = spread.context * (spread.tensor if spread.sequence_parallel else 1)
    elements = question.sequence * spread.microbatch_size * question.shape.hidden / shared
    return elements * question.precision.activation


def _pieces(question: Question, spread: Spread, recompute: Recompute) -> tuple[Piece, ...]:
    return pieces(
        question.shape,
        spread.split,
        sequence=question.sequence,
        microbatch=spread.microbatch_size,
        recompute=recompute,
        precision=question.precision,
        causal=question.kernels.flash,  # what is fused is computed by half, what is not is whole
        kernels=question.kernels,
    )


def _rows(plain: Sequence[Piece], made: Sequence[Piece], roofline: Roofline) -> Floats:
    """A column a piece; equal layers, of which a model has many, are priced once."""
    columns: dict[tuple[object, ...], Floats] = {}
    table = np.empty((len(Row), len(made)))
    for at, (before, piece) in enumerate(zip(plain, made, strict=True)):
        key = (piece.kind, piece.products, piece.kept, piece.traffic, piece.collectives)
        if key not in columns:
            columns[key] = _column(before, piece, roofline.priced(piece))
        table[:, at] = columns[key]
    return table


def _column(plain: Piece, piece: Piece, priced: Priced) -> Floats:
    is_head = piece.kind == "head"
    actions = priced.forward, priced.input_grad, priced.weight_grad
    gradient = sum(one.bytes for one in plain.held if one.name == _LOGITS_GRAD) if is_head else 0.0
    values = {
        Row.F: priced.forward_s,
        Row.I: priced.input_grad_s,
        Row.W: priced.weight_grad_s,
        Row.RECOMPUTE_S: priced.recompute.total_s,
        Row.EXPOSED_S: sum(action.exposed_s for action in actions),
        Row.KEPT: piece.kept_bytes,
        Row.HELD: piece.held_bytes,
        Row.LOGITS: _of_loss(plain) if is_head else 0.0,
        Row.DENSE: sum(weights.count for weights in piece.weights if weights.group == "dense"),
        Row.EXPERT: sum(weights.count for weights in piece.weights if weights.group == "expert"),
        Row.TIED: sum(weights.count for weights in piece.weights if weights.tied),
        Row.SCRATCH: piece.rebuilt_bytes + gradient,
        Row.LOGITS_SCRATCH: gradient,
        Row.HOST_S: sum(action.waited_s for action in actions),
    }
    return np.array([float(values[row]) for row in Row])


def _of_loss(head: Piece) -> float:
    """What the loss keeps, and the norm before it; not what a further layer keeps beside them."""
    return sum(
        one.bytes
        for one in head.kept
        if one.until == "I" and (_LOGITS in one.name or one.name.startswith(_LAST))
    )
