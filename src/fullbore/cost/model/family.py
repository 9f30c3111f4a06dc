"""What the name of a family implies and its configuration does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fullbore.cost.model.shape import Norm, Unfused

__all__ = ["Family", "Mixture", "Windows"]

# Which layers look back only as far as the window, where `layer_types` does not say it.
Windows = Literal["none", "all", "even", "late", "early_even", "all_but_every_4th", "pattern_6"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """How a family's mixture of experts is written.

    width: the key of an expert's width. shared: the key of the shared expert's width, or of how
    many experts it is worth (counted). shared_gate, router_bias, bias, score_bias: as in `Experts`.
    """

    width: str = "moe_intermediate_size"
    shared: str | None = None
    counted: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    score_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Traits of a family.

    names, older: as in `Config`. needs: keys that must be there, null if need be, since their
    default is not the usual one. four_times: whether an MLP is four times as wide where nothing is
    said. grouped: whether `num_key_value_heads` means anything. multi_query: what that is, where it
    is not grouped and nothing is said. asks_window: whether there is a window only where
    `use_sliding_window` says so. A bias is there, or not, or as a key says that is
    named. norms_before, norms_after, parallel: as in `LayerShape`. latent: attention of low rank.
    positions, unused_positions: as in `ModelShape`, but the first, a default, without the second.
    dropout: its default. unfused: as in `ModelShape`.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    four_times: bool = False
    gated: bool = True
    activation: str = "silu"
    grouped: bool = True
    multi_query: bool = False
    norm: Norm = "rms"
    norms_before: int = 2
    norms_after: int = 0
    parallel: bool = False
    qk_norm: Literal["none", "head", "each_head", "all"] = "none"
    qk_norm_kind: Norm = "rms"
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    bias_default: bool = False
    head_bias: bool | str = False
    tied: bool = False
    windows: Windows = "none"
    asks_window: bool = False
    positions: int | None = None
    unused_positions: int = 0
    embedding_norm: bool = False
    rotary: float = 1.0
    sinks: bool = False
    softcap: bool = False
    latent: bool = False
    mixture: Mixture | None = None
    dropout: float = 0.0
    unfused: Unfused = field(default_factory=Unfused)
