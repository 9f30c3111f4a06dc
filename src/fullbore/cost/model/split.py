"""How a model is spread over ranks and what is kept: the choices that a price depends on.

Names are Megatron-LM's. Pipeline and data parallelism are not here: they decide which pieces a
rank has and how often, not what a piece costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from fullbore.errors import ConfigError

__all__ = [
    "CORE",
    "RECOMPUTE_MODULES",
    "Dispatcher",
    "Kernels",
    "Precision",
    "Recompute",
    "RecomputeModule",
    "Split",
    "dispatcher_named",
]

# What selective recomputation can make again (--recompute-modules, as Megatron Core has them).
RecomputeModule = Literal[
    "core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"
]
RECOMPUTE_MODULES: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
CORE: tuple[RecomputeModule, ...] = ("core_attn",)

Granularity = Literal["none", "selective", "full"]
_GRANULARITIES = get_args(Granularity)

Dispatcher = Literal["alltoall", "flex"]


def dispatcher_named(name: str) -> Dispatcher:
    """A value of --moe-token-dispatcher-type. Raises ConfigError for what has no price."""
    for known in get_args(Dispatcher):
        if name == known:
            return cast(Dispatcher, known)
    raise ConfigError(f"--moe-token-dispatcher-type {name[:60]}: it must be alltoall or flex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Sizes of the groups that share one layer.

    tensor: t, the width of each layer is cut. sequence_parallel: what lies between is cut along the
    sequence over the same ranks. context: cp, the sequence is cut everywhere. expert: ep, experts
    are spread. expert_tensor: over how many ranks one expert's width is cut, as tensor where None
    (Megatron's default).
    """

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def width_of_experts(self) -> int:
        """Ranks that one expert is cut over."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What the forward does not keep and the backward makes again.

    granularity: none; selective, some modules of a layer; full, all of a layer but its input.
    layers: of full, how many layers, the first ones; None for all. modules: of selective, in the
    order of `RECOMPUTE_MODULES`; if not given the core of attention (scores, softmax, values).
    """

    granularity: Granularity = "none"
    layers: int | None = None
    modules: tuple[RecomputeModule, ...] = CORE

    def changed(
        self,
        granularity: str | None = None,
        *,
        layers: int | None = None,
        modules: Sequence[str] | None = None,
    ) -> Recompute:
        """As flags say it; what they do not say stays, as far as it belongs to the granularity.

        modules: in any order. Raises ConfigError for words that are not known, and for modules
        without selective recomputation.
        """
        what = self.granularity if granularity is None else granularity
        if what not in _GRANULARITIES:
            raise ConfigError(
                f"--recompute-granularity {what[:60]}: it must be {_or(_GRANULARITIES)}"
            )
        stays = what == self.granularity
        return Recompute(
            granularity=cast(Granularity, what),
            layers=self.layers if layers is None and stays else layers,
            modules=(self.modules if stays else CORE) if modules is None else _known(what, modules),
        )


def _known(granularity: str, modules: Sequence[str]) -> tuple[RecomputeModule, ...]:
    """Modules in their order; ConfigError for one that is not known, or where none can be."""
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            raise ConfigError(
                f"--recompute-modules {module[:60]}: it must be of {_or(RECOMPUTE_MODULES)}"
            )
    if granularity != "selective":
        raise ConfigError("--recompute-modules needs --recompute-granularity selective")
    return tuple(module for module in RECOMPUTE_MODULES if module in modules) or CORE


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes of what training holds.

    name: for printing. weight: of a parameter as products read it. activation: of an element
    between products. product_input: of an element that a product with a weight keeps for W (1 in
    fp8, where it is kept quantized). gradient: of an accumulated gradient. main_weight: of the
    optimizer's own copy, 0 where the weight is it. moments: of the optimizer's states together.
    """

    name: str
    weight: float
    activation: float
    product_input: float
    gradient: float
    main_weight: float
    moments: float = 8.0

    @property
    def in_blocks(self) -> bool:
        """Whether each block of 32 elements has a scale of its own (MXFP8)."""
        return self.name == "fp8_mx"

    @property
    def is_narrow(self) -> bool:
        """Whether products with weights are carried out in 8 bits."""
        return self.name.startswith("fp8")

    @staticmethod
    def named(name: str) -> Precision:
        """bf16, fp16, fp8, fp8_mx, fp8_weights or fp32, with Adam.

        Raises ConfigError for another name.
        """
        known = _PRECISIONS.get(name)
        if known is None:
            raise ConfigError(f"no precision is called {name!r}: {', '.join(_PRECISIONS)}")
        return known


def _mixed(name: str, *, weight: float = 2.0, product_input: float = 2.0) -> Precision:
    return Precision(
        name=name,
        weight=weight,
        activation=2.0,
        product_input=product_input,
        gradient=4.0,
        main_weight=4.0,
    )


_PRECISIONS = {
    "bf16": _mixed("bf16"),
    "fp16": _mixed("fp16"),
    "fp8": _mixed("fp8", product_input=1.0),
    "fp8_mx": _mixed("fp8_mx", product_input=1.0),
    "fp8_weights": _mixed("fp8_weights", weight=1.0, product_input=1.0),
    "fp32": Precision(
        name="fp32", weight=4.0, activation=4.0, product_input=4.0, gradient=4.0, main_weight=0.0
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How operations are carried out, which decides what they keep.

    style: fused, as Megatron-LM with its fused norms, activations and loss; eager, as Hugging
    Face's modules run one operation after another. flash: whether attention keeps no scores.
    dispatcher: how tokens get to their experts: each copy by an all_to_all, or once to each rank
    and node, and multiplied there (flex: DeepEP, HybridEP). dropless: whether experts take as many
    tokens as there are, so that the host waits for their number before it can go on.
    """

    style: Literal["eager", "fused"] = "fused"
    flash: bool = True
    dispatcher: Dispatcher = "alltoall"
    dropless: bool = True
