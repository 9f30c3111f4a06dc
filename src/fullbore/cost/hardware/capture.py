"""What CUDA graphs replay: kernels that the host need not start one by one.

As Megatron Core has it: `--cuda-graph-impl local` and `transformer_engine` capture layers, all of
each or the modules that `--cuda-graph-modules` names; `full_iteration` captures everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fullbore.cost.model.piece import MODULES, Module
from fullbore.errors import ConfigError

__all__ = ["IMPLEMENTATIONS", "Capture"]

IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")
_MODULES = tuple(name for name in MODULES if name != "end")
_OF_EXPERTS: tuple[Module, ...] = ("moe_router", "moe_preprocess", "moe")
_ABSENT = (("None",), ("0",))  # a flag that is given so is not there
_OLDER = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
_ELSEWHERE = ("mamba",)  # known to Megatron Core, of layers that have no price here


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """implementation: one of IMPLEMENTATIONS. modules: of layers, as they were named; all where
    none is.
    """

    implementation: str = "none"
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            raise ConfigError(
                f"--cuda-graph-impl {self.implementation}: it must be {', '.join(IMPLEMENTATIONS)}"
            )
        for name in self.modules:
            if name not in (*_MODULES, *_ELSEWHERE):
                raise ConfigError(
                    f"--cuda-graph-modules {name}: it must be some of {', '.join(_MODULES)}"
                )
        if self.modules and self.implementation not in ("local", "transformer_engine"):
            raise ConfigError(
                "--cuda-graph-modules needs --cuda-graph-impl local or transformer_engine: "
                f"{self.implementation} captures {'nothing' if self.is_off else 'everything'}"
            )

    @staticmethod
    def parse(implementation: str, modules: str | None) -> Capture:
        """As flags say it; modules: names with commas or spaces between. Raises ConfigError."""
        names = (modules or "").replace(",", " ").split()
        return Capture(implementation=implementation, modules=tuple(names))

    @staticmethod
    def of_flags(flags: Mapping[str, tuple[str, ...]]) -> Capture:
        """As Megatron's flags (names with underscores) say it. Raises ConfigError.

        Older releases have --enable-cuda-graph and --external-cuda-graph for the two kinds of
        graphs of layers, and --cuda-graph-scope for what they capture.
        """

        def has(name: str) -> bool:
            return flags.get(name, _ABSENT[0]) not in _ABSENT

        told = " ".join(flags["cuda_graph_impl"]) if has("cuda_graph_impl") else "none"
        older = next((now for name, now in _OLDER.items() if has(name)), "none")
        implementation = older if told == "none" else told
        named = (*flags.get("cuda_graph_modules", ()), *flags.get("cuda_graph_scope", ()))
        if "full_iteration" in named and implementation != "none":
            return Capture(implementation="full_iteration")
        modules = () if implementation in ("none", "full_iteration") else named
        return Capture(implementation=implementation, modules=modules)

    @property
    def is_off(self) -> bool:
        """Whether nothing is captured."""
        return self.implementation == "none"

    def has(self, module: Module) -> bool:
        """Whether a module's kernels are replayed; all of a mixture's layer is `moe`."""
        if self.implementation == "full_iteration":
            return True
        if self.is_off or module == "end":
            return False
        named: Sequence[str] = self.modules or _MODULES
        return module in named or (module in _OF_EXPERTS and "moe" in named)
