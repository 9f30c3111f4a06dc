"""What each rank has to carry, whatever the order of its actions: parameters and work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fullbore.cost.hardware import Layout, optimizer_s
from fullbore.cost.model.states import Sharding, States, states
from fullbore.plan.choice import Spread
from fullbore.plan.prices import Floats, Prices, Row, StageSums, layout_of
from fullbore.plan.question import Question

__all__ = ["Load", "load_of", "states_of"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """Stages placed on ranks, and what follows from that alone.

    home [S]: the rank of each stage. forward_s, backward_s [P]: of one microbatch through all of a
    rank's stages. busy_s [P]: of all of them. parameters, gradients, optimizer, buffers: bytes [P].
    reduction_s [P]: gradients and weights on their way to and from replicas, exposed. optimizer_s:
    of the slowest rank. step_share: of the pipeline's time, lost to what is not modelled.
    hop_s, occupancy_s: of messages between stages, as `Costs` has them. tied_s: of the sum of a
    tied head's gradient and its embedding's, 0 where one rank has both.
    """

    sums: StageSums
    home: Indices
    forward_s: Floats
    backward_s: Floats
    busy_s: Floats
    parameters: Floats
    gradients: Floats
    optimizer: Floats
    buffers: Floats
    reduction_s: Floats
    optimizer_s: float
    step_share: float
    hop_s: float
    occupancy_s: float
    tied_s: float

    @property
    def ranks(self) -> int:
        """P."""
        return len(self.busy_s)


def load_of(
    question: Question,
    spread: Spread,
    prices: Prices,
    sums: StageSums,
    stage_to_rank: tuple[int, ...],
) -> Load:
    """The load of every rank; linear in stages."""
    home = np.array(stage_to_rank, dtype=np.int64)
    layout, precision = layout_of(question, spread), question.precision
    dense, expert = _parameters(sums, home)
    of_dense, of_expert = states_of(question, spread)
    sharded = dense / spread.dense_shards + expert / spread.expert_shards
    forward_s = _by_rank(sums[Row.F], home)
    backward_s = _by_rank(sums[Row.I] + sums[Row.W], home)
    busy_s = (forward_s + backward_s) * spread.microbatches
    sent_s, gathered_s = _messages(question, spread, layout, dense, expert)
    if question.overlap_gradients:
        sent_s = np.maximum(sent_s - backward_s, 0.0)
        if question.overlap_parameters:
            gathered_s = np.maximum(gathered_s - forward_s, 0.0)
    return Load(
        sums=sums,
        home=home,
        forward_s=forward_s,
        backward_s=backward_s,
        busy_s=busy_s,
        parameters=dense * of_dense.weights_bytes + expert * of_expert.weights_bytes,
        gradients=dense * of_dense.gradients_bytes + expert * of_expert.gradients_bytes,
        optimizer=dense * of_dense.optimizer_bytes + expert * of_expert.optimizer_bytes,
        buffers=_buffers(prices, home),
        reduction_s=sent_s + gathered_s,
        optimizer_s=optimizer_s(layout, precision, parameters=float(sharded.max())),
        step_share=question.cluster.constants.step_share,
        hop_s=layout.hop_s,
        occupancy_s=prices.message_bytes / layout.hop_bytes_per_s,
        tied_s=_tied_s(question, layout, sums, home),
    )


def states_of(question: Question, spread: Spread) -> tuple[States, States]:
    """What one parameter takes on its rank: a dense one, and one of an expert."""
    sharding: Sharding = "optim" if spread.distributed else "no_shard"
    dense, expert = (
        states(1.0, question.precision, sharding=sharding, copies=copies)
        for copies in (spread.dense_shards, spread.expert_shards)
    )
    return dense, expert


def _parameters(sums: StageSums, home: Indices) -> tuple[Floats, Floats]:
    """Dense parameters of each rank, and those of experts, [P] each.

    A head that is tied to the embedding is there once where one rank has both.
    """
    dense, expert = _by_rank(sums[Row.DENSE], home), _by_rank(sums[Row.EXPERT], home)
    if home[0] == home[-1]:
        dense[home[-1]] -= sums[Row.TIED][-1]
    return dense, expert


def _by_rank(of_stage: Floats, home: Indices) -> Floats:
    """The sum over each rank's stages [P]."""
    return np.bincount(home, weights=of_stage).astype(np.float64, copy=False)


def _messages(
    question: Question, spread: Spread, layout: Layout, dense: Floats, expert: Floats
) -> tuple[Floats, Floats]:
    """Seconds [P] each in which gradients are summed, and weights gathered again (ZeRO-1)."""
    precision, sent_s, gathered_s = question.precision, np.zeros(len(dense)), np.zeros(len(dense))
    kind = "reduce_scatter" if spread.distributed else "all_reduce"
    for group, counts in (("gradient", dense), ("expert_gradient", expert)):
        known: dict[float, tuple[float, float]] = {}
        for rank, count in enumerate(counts.tolist()):
            if count == 0.0:
                continue
            if count not in known:
                sent = layout.collective_s(kind, count * precision.gradient, group)
                size = count * precision.weight if spread.distributed else 0.0
                known[count] = sent, layout.collective_s("all_gather", size, group)
            sent_s[rank] += known[count][0]
            gathered_s[rank] += known[count][1]
    return sent_s, gathered_s


def _tied_s(question: Question, layout: Layout, sums: StageSums, home: Indices) -> float:
    """An all_reduce between the ranks of the two ends, after their replicas' (as Megatron does)."""
    if home[0] == home[-1]:
        return 0.0
    size = float(sums[Row.TIED][-1]) * question.precision.gradient
    return layout.collective_s("all_reduce", size, "ends")


def _buffers(prices: Prices, home: Indices) -> Floats:
    """A message coming and one going, of either kind, wherever a rank has a neighbour for it."""
    crosses = home[:-1] != home[1:]
    sends, takes = (np.zeros(int(home.max()) + 1, dtype=np.bool_) for _ in range(2))
    sends[home[:-1][crosses]] = True
    takes[home[1:][crosses]] = True
    return 2.0 * prices.message_bytes * (sends.astype(np.float64) + takes)
