"""What is asked: a model, a cluster, a batch, and whatever is not to be chosen freely."""

from __future__ import annotations

from dataclasses import dataclass, field

from fullbore.cost.hardware import GIB, Capture, Cluster, Overlap
from fullbore.cost.model import Kernels, ModelShape, Precision, Recompute
from fullbore.cost.model.legal import check_length
from fullbore.errors import ConfigError
from fullbore.plan.engines import Engine

__all__ = ["Allowance", "Borrowed", "Fixed", "Question"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Memory that no tensor accounts for.

    context_bytes: CUDA's context, libraries' workspaces and communicators' buffers, a rank.
    fragmented: what the allocator loses, as a share of activations, logits and buffers, which come
    and go; weights and optimizer states stay where they are. Assumed, not measured.
    """

    context_bytes: float = 2.0 * GIB
    fragmented: float = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What the asker has decided: the values that may be tried, None where all may.

    Sizes as in `Choice`. recompute: those to try. engines: those that must all be able to run it.
    distributed: whether optimizer states are spread over replicas; where None, wherever there are
    several, since it costs neither time nor memory.
    """

    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    context: tuple[int, ...] = (1,)
    expert: tuple[int, ...] = (1,)
    expert_tensor: int | None = None
    microbatch_size: tuple[int, ...] | None = None
    virtual_stages: tuple[int, ...] | None = None
    group: tuple[int, ...] | None = None
    schedules: tuple[str, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    layers: tuple[int, ...] | None = None
    engines: tuple[Engine, ...] = ()
    sequence_parallel: bool | None = None
    distributed: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """Flags that came with the model. taken: those that hold, with their values, since no others
    were typed. said: the names of all of them. optimizer: of those taken, what says the types of
    gradients and states, for which `fullbore plan` has no flags.
    """

    taken: tuple[str, ...] = ()
    said: frozenset[str] = frozenset()
    optimizer: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that a plan depends on.

    global_batch: sequences a step. sequence: tokens of one. capture: what CUDA graphs replay.
    memory_limit_bytes: of a device, all of its memory where None. overlap_messages: whether ranks
    compute while messages between stages travel. overlap_gradients: whether gradients are summed
    beside the backward; overlap_parameters: whether weights that replicas share out are gathered
    beside the forward then, too (Megatron-LM does not do this without that). optimizer: by its name
    in Megatron-LM. causal: whether model FLOPs leave out the half of attention that the mask hides.
    borrowed: where some of it came from; for printing.
    """

    shape: ModelShape
    cluster: Cluster
    global_batch: int
    sequence: int
    precision: Precision = field(default_factory=lambda: Precision.named("bf16"))
    kernels: Kernels = field(default_factory=Kernels)
    fixed: Fixed = field(default_factory=Fixed)
    allowance: Allowance = field(default_factory=Allowance)
    overlap: Overlap = field(default_factory=Overlap)
    capture: Capture = field(default_factory=Capture)
    memory_limit_bytes: float | None = None
    overlap_messages: bool = True
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    optimizer: str = "adam"
    causal: bool = True
    borrowed: Borrowed = field(default_factory=Borrowed)

    def __post_init__(self) -> None:
        for flag, value in (
            ("--global-batch-size", self.global_batch),
            ("--seq-length", self.sequence),
        ):
            if value < 1:
                raise ConfigError(f"{flag} {value}: it must be 1 or more")
        check_length(self.shape, self.sequence)
        device, limit = self.cluster.device, self.memory_limit_bytes
        device.peak_flop_per_s(self.precision.name)
        if limit is not None and not 0 < limit <= device.memory_bytes:
            raise ConfigError(
                f"--memory-limit {limit / GIB:.4g} GiB: {device.title} has "
                f"{device.memory_bytes / GIB:.4g} GiB; give that or less"
            )

    @property
    def limit_bytes(self) -> float:
        """The most that any rank may hold."""
        if self.memory_limit_bytes is not None:
            return self.memory_limit_bytes
        return self.cluster.device.memory_bytes
