"""From what was typed for `fullbore model` to a priced model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, inf
from pathlib import Path
from typing import Literal, TypeVar, cast

from fullbore.cost.hardware import Capture
from fullbore.cost.model.config import read_config
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.layer import pieces
from fullbore.cost.model.legal import check_length
from fullbore.cost.model.megatron import Given, given_by_flags, shape_of_flags
from fullbore.cost.model.piece import Piece
from fullbore.cost.model.script import read_flags
from fullbore.cost.model.shape import ModelShape
from fullbore.cost.model.split import (
    Dispatcher,
    Kernels,
    Precision,
    Recompute,
    Split,
    dispatcher_named,
)
from fullbore.cost.model.states import Sharding, States, states_of_pieces
from fullbore.cost.model.totals import Totals, active_parameters, totals
from fullbore.errors import ConfigError

__all__ = ["Asked", "Setting", "modules_of", "read_setting", "usual_length"]

_T = TypeVar("_T")
_SEQUENCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed; None where it was not."""

    config: Path | None
    megatron: str | None
    tensor: int | None
    sequence_parallel: bool | None
    context: int | None
    expert: int | None
    expert_tensor: int | None
    sequence: int | None
    microbatch: int | None
    recompute: str | None
    recompute_layers: int | None
    recompute_modules: str | None
    flash: bool | None
    kernels: str
    precision: str | None
    dispatcher: str | None
    graphs: str | None
    graph_modules: str | None
    data_parallel: int | None
    sharding: str | None
    causal: bool
    tokens_per_s: float | None
    peak_tflops: float | None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, how it is spread, and what it costs so."""

    name: str
    shape: ModelShape
    split: Split
    sequence: int
    microbatch: int
    recompute: Recompute
    precision: Precision
    kernels: Kernels
    causal: bool
    sharding: Sharding
    data_parallel: int
    capture: Capture = field(default_factory=Capture)
    tokens_per_s: float | None = None
    peak_tflops: float | None = None
    given: Given = field(default_factory=Given)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Embedding, layers and head of one rank."""
        return self._priced(self.split)

    @cached_property
    def unsplit(self) -> tuple[Piece, ...]:
        """The same of the whole model on one rank."""
        return self._priced(Split())

    def _priced(self, split: Split) -> tuple[Piece, ...]:
        return pieces(
            self.shape,
            split,
            sequence=self.sequence,
            microbatch=self.microbatch,
            recompute=self.recompute,
            precision=self.precision,
            causal=self.causal,
            kernels=self.kernels,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.sequence * self.microbatch

    @cached_property
    def rank(self) -> Totals:
        """Sums of one rank, as if it had every layer."""
        return totals(self.pieces)

    @cached_property
    def whole(self) -> Totals:
        """Sums of the unsplit model."""
        return totals(self.unsplit)

    @property
    def active_parameters(self) -> float:
        """Parameters that a token meets."""
        return active_parameters(self.shape, self.unsplit)

    @property
    def states(self) -> States:
        """Bytes that stay on one rank, as if it had every layer."""
        return states_of_pieces(
            self.pieces,
            self.precision,
            self.split,
            sharding=self.sharding,
            data_parallel=self.data_parallel,
        )


def read_setting(asked: Asked) -> Setting:
    """The model and its price. Raises ModelError, or ConfigError naming the flag."""
    name, shape, given, graphs = _read_model(asked)
    precision = Precision.named(_first(asked.precision, given.precision, "bf16"))
    split = _split(asked, given)
    setting = Setting(
        name=name,
        shape=shape,
        split=split,
        sequence=_sequence(asked, given, shape),
        microbatch=_first(asked.microbatch, given.microbatch, 1),
        recompute=_recompute(asked, given),
        precision=precision,
        kernels=_kernels(asked, given),
        causal=asked.causal,
        sharding=cast(Sharding, asked.sharding or given.sharding or "no_shard"),
        data_parallel=_replicas(asked, split),
        capture=_capture(asked, graphs),
        tokens_per_s=asked.tokens_per_s,
        peak_tflops=asked.peak_tflops,
        given=given,
    )
    _check_rate(asked)
    return setting


def _read_model(asked: Asked) -> tuple[str, ModelShape, Given, Capture]:
    if (asked.config is None) == (asked.megatron is None):
        raise ConfigError(
            "give one model: a Hugging Face config.json (or its folder), or --megatron FLAGS"
        )
    if asked.config is not None:
        return _name(asked.config), shape_of(read_config(asked.config)), Given(), Capture()
    assert asked.megatron is not None
    flags = read_flags(asked.megatron)
    path = Path(asked.megatron.strip().splitlines()[0][:200])
    name = path.name if path.suffix in (".sh", ".yaml", ".yml") else "Megatron flags"
    return name, shape_of_flags(flags), given_by_flags(flags), Capture.of_flags(flags)


def _name(config: Path) -> str:
    """The folder of a config.json, else the file without its ending."""
    path = config.resolve()
    if path.is_dir():
        return path.name
    return path.parent.name if path.name == "config.json" else path.stem


def _first(*values: _T | None) -> _T:
    return next(value for value in values if value is not None)


def _split(asked: Asked, given: Given) -> Split:
    return Split(
        tensor=_first(asked.tensor, given.tensor, 1),
        sequence_parallel=_first(asked.sequence_parallel, given.sequence_parallel, False),
        context=_first(asked.context, given.context, 1),
        expert=_first(asked.expert, given.expert, 1),
        expert_tensor=given.expert_tensor if asked.expert_tensor is None else asked.expert_tensor,
    )


def _replicas(asked: Asked, split: Split) -> int:
    """As typed, or as few as experts spread over that many ranks can have."""
    if asked.data_parallel is not None:
        if asked.data_parallel < 1:
            raise ConfigError(f"--data-parallel-size {asked.data_parallel}: it must be 1 or more")
        return asked.data_parallel
    groups = split.expert * split.width_of_experts
    return max(1, groups // gcd(groups, max(1, split.context * split.tensor)))


def _sequence(asked: Asked, given: Given, shape: ModelShape) -> int:
    sequence = _first(asked.sequence, given.sequence, usual_length(shape))
    check_length(shape, sequence)
    return sequence


def usual_length(shape: ModelShape) -> int:
    """Tokens of a sequence where nothing is said."""
    return min(_SEQUENCE, shape.longest or _SEQUENCE)


def _recompute(asked: Asked, given: Given) -> Recompute:
    return (given.recompute or Recompute()).changed(
        asked.recompute, layers=asked.recompute_layers, modules=modules_of(asked.recompute_modules)
    )


def modules_of(text: str | None) -> list[str] | None:
    """What --recompute-modules names, with commas or blanks between; None where it is not there."""
    return None if text is None else text.replace(",", " ").split()


def _kernels(asked: Asked, given: Given) -> Kernels:
    if asked.kernels not in ("eager", "fused"):
        raise ConfigError(f"--kernels {asked.kernels}: it must be eager or fused")
    return Kernels(
        style=cast(Literal["eager", "fused"], asked.kernels),
        flash=_first(asked.flash, given.flash, True),
        dispatcher=_dispatcher(asked, given),
        dropless=given.dropless,
    )


def _capture(asked: Asked, said: Capture) -> Capture:
    """What was typed, or else what flags said; modules of other graphs are passed over."""
    if asked.graphs is None and asked.graph_modules is None:
        return said
    return Capture.parse(asked.graphs or said.implementation, asked.graph_modules)


def _dispatcher(asked: Asked, given: Given) -> Dispatcher:
    if asked.dispatcher is not None:
        return dispatcher_named(asked.dispatcher)
    return given.dispatcher or "alltoall"


def _check_rate(asked: Asked) -> None:
    if (asked.tokens_per_s is None) != (asked.peak_tflops is None):
        raise ConfigError("MFU needs both --tokens-per-s-per-gpu and --peak-tflops")
    for flag, value in (
        ("--tokens-per-s-per-gpu", asked.tokens_per_s),
        ("--peak-tflops", asked.peak_tflops),
    ):
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"{flag} {value}: it must be a number above 0")
