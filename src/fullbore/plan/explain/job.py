"""Megatron's flags on a cluster: every number that follows from them, or why it does not.

Nothing here raises: what cannot be worked out is a `Refused` with the reason, so that one mistake
hides no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from fullbore.cost.hardware import Cluster
from fullbore.cost.model import CORE, ModelShape, Split
from fullbore.cost.model.megatron import Given, given_by_flags, shape_of_flags
from fullbore.errors import ConfigError
from fullbore.megatron import (
    PipelineShape,
    choose_schedule,
    count_microbatches,
    count_virtual_stages,
    split_layers,
)
from fullbore.plan.explain.catalog import CHOICES, NUMBERS
from fullbore.plan.explain.edit import Edit
from fullbore.plan.explain.stage_layout import layers_of_layout

__all__ = ["Job", "Refused"]

_T = TypeVar("_T")
_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_FIRST = "decoder_first_pipeline_num_layers"
_LAST = "decoder_last_pipeline_num_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What cannot be, and why."""

    message: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """Flags (names with underscores) on a cluster. Sizes that flags do not say, or say wrongly, 1.

    name: what the model is called.
    """

    flags: Mapping[str, tuple[str, ...]]
    cluster: Cluster
    name: str = "megatron"

    def changed(self, edit: Edit) -> Job:
        """The job with flags changed."""
        return replace(self, flags=edit.applied(self.flags))

    def has(self, name: str) -> bool:
        """Whether a flag is there, and not there as None or 0."""
        return name in self.flags and self.flags[name] not in (("None",), ("0",))

    def number(self, name: str) -> int | None:
        """A whole number; None where there is none, or none that is one."""
        words = self.flags.get(name, ())
        if len(words) != 1 or not words[0].isdecimal():
            return None
        value = int(words[0])
        return value if value >= max(1, NUMBERS.get(name, 1)) else None

    def size(self, name: str) -> int:
        """The same; 1 where there is none."""
        return self.number(name) or 1

    def word(self, name: str) -> str | None:
        """One of a flag's choices; None where there is none."""
        words = self.flags.get(name, ())
        return words[0] if len(words) == 1 and words[0] in CHOICES[name] else None

    @property
    def tensor(self) -> int:
        """T."""
        return self.size("tensor_model_parallel_size")

    @property
    def pipeline(self) -> int:
        """P."""
        return self.size("pipeline_model_parallel_size")

    @property
    def context(self) -> int:
        """C."""
        return self.size("context_parallel_size")

    @property
    def expert(self) -> int:
        """E."""
        return self.size("expert_model_parallel_size")

    @property
    def one_replica(self) -> int:
        """T·C·P."""
        return self.tensor * self.context * self.pipeline

    @property
    def is_whole(self) -> bool:
        """Whether the cluster holds a whole number of replicas, so that D and M are known."""
        return self.cluster.size % self.one_replica == 0

    @property
    def data(self) -> int:
        """D; 1 where the cluster holds no whole replica."""
        return max(1, self.cluster.size // self.one_replica)

    @property
    def sequence_parallel(self) -> bool:
        """Megatron switches it off where T is 1."""
        return self.tensor > 1 and self.has("sequence_parallel")

    @property
    def distributed(self) -> bool:
        """Whether replicas share out the optimizer's states."""
        strategy = self.word("data_parallel_sharding_strategy") or "no_shard"
        return self.has("use_distributed_optimizer") or strategy != "no_shard"

    @property
    def split(self) -> Split:
        """What cuts a layer."""
        return Split(
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.number("expert_tensor_parallel_size"),
        )

    @property
    def granularity(self) -> str | None:
        """Of recomputation: --recompute-activations is another word for selective."""
        if self.has("recompute_activations"):
            return "selective"
        return self.word("recompute_granularity")

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """Of selective recomputation."""
        return self.flags.get("recompute_modules") or CORE

    @property
    def ends(self) -> tuple[int, int]:
        """Layers that embedding and loss count as when layers are shared out."""
        return (
            int(self.has("account_for_embedding_in_pipeline_split")),
            int(self.has("account_for_loss_in_pipeline_split")),
        )

    @cached_property
    def shape(self) -> ModelShape | Refused:
        """The model."""
        return _attempt(lambda: replace(shape_of_flags(dict(self.flags)), name=self.name))

    @cached_property
    def given(self) -> Given | Refused:
        """What else the flags say."""
        return _attempt(lambda: given_by_flags(dict(self.flags)))

    @cached_property
    def microbatches(self) -> int | Refused:
        """M."""
        return _attempt(
            lambda: count_microbatches(
                global_batch_size=self.number("global_batch_size"),
                micro_batch_size=self.number("micro_batch_size"),
                data_parallel_size=self.data,
            )
        )

    @property
    def sequences(self) -> int | None:
        """Of a step: without a global batch, one microbatch a replica."""
        if "global_batch_size" in self.flags:
            return self.number("global_batch_size")
        once = self.number("micro_batch_size")
        return None if once is None else once * self.data

    @cached_property
    def virtual_stages(self) -> int | Refused:
        """v."""
        if isinstance(self._by_layout, tuple):
            return len(self._by_layout) // self.pipeline
        layers = self.number("num_layers")
        return _attempt(
            lambda: count_virtual_stages(
                ranks=self.pipeline,
                layers=None if layers is None else layers + sum(self.ends),
                layers_per_stage=self.number(_PER_CHUNK),
                virtual_stages=self.number(_CHUNKS),
            )
        )

    @cached_property
    def stage_layers(self) -> tuple[int, ...] | Refused:
        """Layers of each stage [S]; where v is refused, as if it were 1."""
        if self._by_layout is not None:
            return self._by_layout
        layers, ends = self.number("num_layers"), self.ends
        if layers is None:
            return Refused(message="--num-layers is missing: say how many layers the model has")
        v = self.virtual_stages
        made = _attempt(
            lambda: split_layers(
                layers=layers + sum(ends),
                ranks=self.pipeline,
                virtual_stages=v if isinstance(v, int) else 1,
                first=self.number(_FIRST),
                last=self.number(_LAST),
            )
        )
        if isinstance(made, Refused) or not sum(ends):
            return made
        if len(made) == 1:
            return (layers,)
        return (made[0] - ends[0], *made[1:-1], made[-1] - ends[1])

    @cached_property
    def _by_layout(self) -> tuple[int, ...] | Refused | None:
        words = self.flags.get("pipeline_model_parallel_layout")
        if not words:
            return None
        return _attempt(
            lambda: layers_of_layout(
                "".join(words),
                layers=self.number("num_layers"),
                ranks=self.pipeline,
                further=self.number("mtp_num_layers") or 0,
            )
        )

    @cached_property
    def schedule(self) -> PipelineShape | Refused | None:
        """1F1B or interleaved, with its G; None where v or M is refused already."""
        v, microbatches = self.virtual_stages, self.microbatches
        if isinstance(v, Refused) or isinstance(microbatches, Refused):
            return None
        return _attempt(
            lambda: choose_schedule(
                name=None,
                ranks=self.pipeline,
                virtual_stages=v,
                microbatches=microbatches,
                group_size=self.number("microbatch_group_size_per_virtual_pipeline_stage"),
            )
        )

    @property
    def interleaved(self) -> bool:
        """Whether a rank has several stages; False too where v is refused."""
        return isinstance(self.virtual_stages, int) and self.virtual_stages > 1


def _attempt(make: Callable[[], _T]) -> _T | Refused:
    try:
        return make()
    except ConfigError as error:
        return Refused(message=str(error))
