"""Which ranks share a node: Megatron-LM's order of ranks, and the groups that follow from it.

Ranks count through the tensor-parallel group first, then context, data and pipeline:

    rank = t + T·(c + C·(d + D·p))

Experts are spread over ranks of neighbouring context and data indices, each expert's width over
`expert_tensor` neighbours. Nodes take ranks in order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import lcm

from fullbore.cost.hardware.cluster import Cluster
from fullbore.cost.hardware.links import Ring, collective_s, turn_s
from fullbore.errors import ConfigError

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the groups of a job on a cluster.

    tensor T, context C, expert E, data D, pipeline P; T·C·D·P ranks. expert_tensor: ranks that one
    expert is cut over, T where None. Raises ConfigError where the cluster is too small, or E does
    not divide the ranks that can hold experts.
    """

    cluster: Cluster
    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    pipeline: int = 1
    expert_tensor: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "context", "expert", "data", "pipeline", "expert_tensor"):
            size = getattr(self, name)
            if size is not None and size < 1:
                told = name.replace("_", " ")
                raise ConfigError(f"{told} parallel size {size}: it must be 1 or more")
        if self.ranks > self.cluster.size:
            raise ConfigError(
                f"tensor {self.tensor} x context {self.context} x data {self.data} x pipeline "
                f"{self.pipeline} are {self.ranks} ranks; {self.cluster.name} has "
                f"{self.cluster.size} devices"
            )
        stage = self.tensor * self.context * self.data
        if stage % (self._expert_stride * self.expert):
            raise ConfigError(
                f"expert parallel size {self.expert} x {self._expert_stride} does not divide the "
                f"{stage} ranks of a pipeline stage (tensor x context x data)"
            )

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.tensor * self.context * self.data * self.pipeline

    def ring(self, group: str) -> Ring:
        """The ranks of a group: tensor, context, expert, data, gradient, expert_gradient or ends.

        gradient: the ranks whose gradients of dense weights are summed, context times data;
        expert_gradient: the same for the weights of experts. ends: the two ranks of the first and
        the last stage that hold the same part of a tied embedding.
        """
        if group == "ends":  # where ranks are more than a node's, no node has both for all pairs
            size = min(2, self.pipeline)
            alone = size > 1 and self.ranks > self.cluster.device.gpus_per_node
            return Ring(size=size, in_node=1 if alone else size)
        stride, size = self._shape(group)
        return Ring(size=size, in_node=self._in_node(stride, size))

    def collective_s(self, kind: str, size_bytes: float, group: str, *, copies: int = 1) -> float:
        """Seconds of a collective within a group, as `links.collective_s`."""
        cluster = self.cluster
        ring = self.ring(group)
        return collective_s(
            kind, size_bytes, ring, cluster.device, cluster.constants, copies=copies
        )

    def turn_s(self, size_bytes: float, group: str) -> float:
        """Seconds of a turn round a group's neighbours, as `links.turn_s`."""
        return turn_s(size_bytes, self.ring(group), self.cluster.device, self.cluster.constants)

    @property
    def hops_leave(self) -> bool:
        """Whether some message from stage to stage leaves its node."""
        stride = self.tensor * self.context * self.data
        return self.pipeline > 1 and self._in_node(stride, self.pipeline) < self.pipeline

    @property
    def hop_bytes_per_s(self) -> float:
        """One way between neighbouring stages, where it is slowest."""
        device, constants = self.cluster.device, self.cluster.constants
        if self.hops_leave:
            return device.network_bytes_per_s * constants.network_share
        return device.pair_bytes_per_s * constants.message_share

    @property
    def hop_s(self) -> float:
        """Latency of a message between stages."""
        return self.cluster.constants.hop_s

    @property
    def _expert_stride(self) -> int:
        return self.tensor if self.expert_tensor is None else self.expert_tensor

    def _shape(self, group: str) -> tuple[int, int]:
        """Distance of neighbours in a group, and its size."""
        tensor, context = self.tensor, self.context
        experts = self._expert_stride * self.expert
        match group:
            case "tensor":
                return 1, tensor
            case "context":
                return tensor, context
            case "data":
                return tensor * context, self.data
            case "gradient":
                return tensor, context * self.data
            case "expert":
                return self._expert_stride, self.expert
            case "expert_gradient":
                return experts, tensor * context * self.data // experts
        raise AssertionError(f"no group is called {group}")

    def _in_node(self, stride: int, size: int) -> int:
        """Ranks of a group on its emptiest node, of the group where that is the fewest."""
        node = self.cluster.device.gpus_per_node
        if self.ranks <= node or node % (stride * size) == 0:
            return size
        if stride % node == 0:
            return 1
        if stride * size % node == 0 and node % stride == 0:
            return node // stride
        return _fewest_together(stride, size, node=node, ranks=self.ranks)


@cache
def _fewest_together(stride: int, size: int, *, node: int, ranks: int) -> int:
    """Of all groups and the nodes that they are on, the fewest ranks of a group on a node."""
    block = stride * size
    return min(
        min(Counter((first + i * stride) // node for i in range(size)).values())
        # Blocks of groups and nodes begin together again after their least common multiple.
        for start in range(0, min(lcm(block, node), ranks), block)
        for first in range(start, start + stride)
    )
