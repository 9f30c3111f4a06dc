"""One way to train a model on a cluster: every number that a launch command would name.

P·T·C·D devices: P pipeline, T tensor, C context, D data parallel; E experts' spread over them.
M = global batch / (micro-batch size · D) microbatches a step, in stages v a pipeline rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullbore.cost.model import CORE, Recompute, Split

__all__ = ["NONE", "Choice", "Spread", "recompute_name"]

NONE = Recompute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How devices are shared out, and in which portions the batch comes.

    microbatch_size: b, sequences. microbatches: M. distributed: whether each replica keeps the
    optimizer's states of a share of the weights.
    """

    pipeline: int
    tensor: int
    context: int
    expert: int
    data: int
    microbatch_size: int
    microbatches: int
    sequence_parallel: bool
    distributed: bool
    expert_tensor: int | None = None

    @property
    def split(self) -> Split:
        """What cuts a single layer."""
        return Split(
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    @property
    def dense_shards(self) -> int:
        """Over how many ranks the optimizer's states of dense weights are spread."""
        return self.data * self.context if self.distributed else 1

    @property
    def expert_shards(self) -> int:
        """The same for the weights of experts."""
        if not self.distributed:
            return 1
        width = self.split.width_of_experts * self.expert
        return max(1, self.tensor * self.context * self.data // width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A spread with its pipeline schedule.

    group: G, None for a schedule without. recompute: of `full`, layers is a number for each stage
    (Megatron's block method), None for all. layers: of each stage [S], None for those that cost
    decides; the embedding goes with the first layer, the head is on the last stage, which may have
    no layer besides.
    """

    spread: Spread
    schedule: str
    virtual_stages: int
    group: int | None = None
    recompute: Recompute = NONE
    layers: tuple[int, ...] | None = None

    @property
    def stages(self) -> int:
        """S."""
        return self.spread.pipeline * self.virtual_stages


def recompute_name(recompute: Recompute) -> str:
    """none, selective, `selective, layernorm and mlp`, full, or `full, 3 a stage`."""
    if recompute.layers is not None:
        return f"{recompute.granularity}, {recompute.layers} a stage"
    if recompute.modules != CORE:
        return f"{recompute.granularity}, {' and '.join(recompute.modules)}"
    return recompute.granularity
