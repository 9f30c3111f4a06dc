"""One device of a cluster: what its data sheet promises, and how much of that is reached.

Both are data. `presets/` holds a file a GPU, each figure with its source; `constants/` holds a file
a generation, with the few numbers that turn a promise into seconds (docs/hardware.md).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fullbore.errors import ConfigError

__all__ = [
    "GIB",
    "Constants",
    "Device",
    "checked",
    "constants_of",
    "preset",
    "preset_in",
    "presets",
]

Model = TypeVar("Model", bound=BaseModel)

GIB = 2**30
_GIGA, _TERA = 1e9, 1e12
_CARDS = frozenset(("pcie", "nvl"))  # as in "NVIDIA H100 PCIe"
_LEAST = 1e-6  # a share below is a mistake, and what it divides has no end
_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Constants(BaseModel):
    """What a generation of devices reaches of its peaks, and what it pays besides."""

    model_config = _STRICT

    product_share: float = Field(
        ge=_LEAST, le=1, description="of the dense peak, reached by a product without end"
    )
    tile_rows: int = Field(gt=0, description="rows of the output that one multiprocessor makes")
    tile_columns: int = Field(gt=0, description="columns of the same")
    tail_waves: float = Field(
        ge=0, description="waves of tiles lost at the end of a product, where some have no work"
    )
    inner_lost: float = Field(
        ge=0, description="elements of the inner dimension lost to the start and end of a tile"
    )
    attention_share: float = Field(
        ge=_LEAST, le=1, description="of the dense peak, reached by a fused attention forward"
    )
    attention_backward_share: float = Field(
        ge=_LEAST, le=1, description="of the dense peak, reached by a fused attention backward"
    )
    memory_share: float = Field(
        ge=_LEAST, le=1, description="of the memory's bandwidth, reached by copies and products"
    )
    traffic_share: float = Field(
        ge=_LEAST,
        le=1,
        description="the same of norms, activations, softmax and sums, with what is not listed",
    )
    cast_share: float = Field(
        ge=_LEAST, le=1, description="the same of casts to 8 bits, with their scaling"
    )
    block_cast_share: float = Field(
        default=0.2,
        ge=_LEAST,
        le=1,
        description="the same of casts in blocks (MXFP8), both ways and with their scales",
    )
    kernel_s: float = Field(ge=0, description="seconds between two kernels")
    cast_kernels: int = Field(default=1, ge=1, description="kernels of a cast to 8 bits")
    launch_s: float = Field(
        default=0.0,
        ge=0,
        description="seconds of the host until a kernel is started: framework, autograd, launch",
    )
    node_share: float = Field(
        ge=_LEAST, le=1, description="of the bandwidth within a node, reached by collectives"
    )
    message_share: float = Field(
        ge=_LEAST, le=1, description="of the same, reached by one message between two devices"
    )
    network_share: float = Field(ge=_LEAST, le=1, description="of the network's bandwidth")
    hidden_share: float = Field(
        ge=0, le=1, description="of a message beside computation, hidden by it"
    )
    collective_s: float = Field(ge=0, description="seconds of a collective without data in a node")
    network_step_s: float = Field(
        ge=0, description="seconds of each step of a ring that crosses the network"
    )
    hop_s: float = Field(ge=0, description="seconds until a message between two devices arrives")
    step_share: float = Field(
        ge=0, description="of a step's compute, lost to what is not modelled (waiting for the slow)"
    )


class Device(BaseModel):
    """One GPU and its place in a node. A GB is 1e9 bytes, a GiB 2^30; peaks are dense.

    node_gb_per_s: what one device sends to all others of its node at once, one way.
    pair_gb_per_s: to one of them, where that is less. network_gb_per_s: a device's share of what
    leaves the node, one way. host_gb_per_s: to the host, one way.
    """

    model_config = _STRICT

    title: str
    generation: str
    multiprocessors: int = Field(gt=0)
    bf16_tflop_per_s: float | None = Field(default=None, gt=0)
    fp16_tflop_per_s: float | None = Field(default=None, gt=0)
    fp8_tflop_per_s: float | None = Field(default=None, gt=0)
    fp32_tflop_per_s: float | None = Field(default=None, gt=0)
    memory_gib: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    gpus_per_node: int = Field(gt=0)
    node_gb_per_s: float = Field(gt=0)
    pair_gb_per_s: float | None = Field(default=None, gt=0)
    network_gb_per_s: float = Field(gt=0)
    host_gb_per_s: float = Field(gt=0)
    unofficial: tuple[str, ...] = ()
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = {name for name in type(self).model_fields if getattr(self, name) is not None}
        for what, names in (("sources", self.sources), ("unofficial", self.unofficial)):
            for name in names:
                if name not in known:
                    raise ValueError(f"{what} names {name}, which is no figure of this device")
        if not any(self.peaks.values()):
            raise ValueError("give at least one peak, such as bf16_tflop_per_s")
        return self

    @property
    def peaks(self) -> dict[str, float | None]:
        """TFLOP/s by precision, None where the device has none."""
        return {
            "bf16": self.bf16_tflop_per_s,
            "fp16": self.fp16_tflop_per_s,
            "fp8": self.fp8_tflop_per_s,
            "fp32": self.fp32_tflop_per_s,
        }

    def peak_flop_per_s(self, precision: str) -> float:
        """Dense FLOP/s of products in a precision; ConfigError where the device has none."""
        peak = self.peaks.get("fp8" if precision.startswith("fp8") else precision)
        if peak is None:
            having = ", ".join(name for name, value in self.peaks.items() if value is not None)
            own = f" (a cluster file of your own may give {precision}_tflop_per_s)"
            own = "" if precision.startswith("fp8") else own
            raise ConfigError(f"{self.title} has no {precision} peak; it has {having}{own}")
        return peak * _TERA

    @property
    def memory_bytes(self) -> float:
        """Bytes of device memory."""
        return self.memory_gib * GIB

    @property
    def memory_bytes_per_s(self) -> float:
        """Peak bandwidth of device memory."""
        return self.memory_gb_per_s * _GIGA

    @property
    def node_bytes_per_s(self) -> float:
        """One way, to all others of the node at once."""
        return self.node_gb_per_s * _GIGA

    @property
    def pair_bytes_per_s(self) -> float:
        """One way, to one other device of the node."""
        return (self.pair_gb_per_s or self.node_gb_per_s) * _GIGA

    @property
    def network_bytes_per_s(self) -> float:
        """One way, out of the node."""
        return self.network_gb_per_s * _GIGA

    @property
    def host_bytes_per_s(self) -> float:
        """One way, between device and host."""
        return self.host_gb_per_s * _GIGA


def presets() -> tuple[str, ...]:
    """The names of the presets."""
    return tuple(sorted(_names("presets")))


@cache
def preset(name: str) -> Device:
    """The device of a preset; ConfigError with the known names for another."""
    if name.lower() not in _names("presets"):
        raise ConfigError(
            f"no device is called {name!r}; known are {', '.join(presets())}, or give the path of "
            "a TOML file (fullbore calibrate writes one)"
        )
    return checked(Device, _read("presets", name.lower()), where=f"preset {name}")


def preset_in(text: str) -> str | None:
    """The preset that a driver's name of a device contains, such as "NVIDIA H100 80GB HBM3".

    None for cards of the same name that are slower and have fewer links: presets are of boards with
    all of them.
    """
    words = text.lower().replace("-", " ").split()
    if not _CARDS.isdisjoint(words):
        return None
    return next((name for name in presets() if name in words), None)


@cache
def constants_of(generation: str) -> Constants:
    """The constants of a generation; ConfigError with the known ones for another."""
    known = sorted(_names("constants"))
    if generation not in known:
        raise ConfigError(
            f"generation: no constants are known for {generation!r}; known are {', '.join(known)}; "
            "a file may give its own under [constants]"
        )
    return checked(Constants, _read("constants", generation), where=f"constants of {generation}")


def checked(kind: type[Model], data: Mapping[str, object], *, where: str) -> Model:
    """A mapping as a Device or as Constants; ConfigError that names every wrong field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = [
            f"{where}: {'.'.join(map(str, found['loc'])) or 'the file'}: "
            f"{_finding(found['type'], found['msg'], kind)}"
            for found in error.errors()
        ]
        raise ConfigError("\n".join(lines)) from None


def _finding(kind: str, message: str, model: type[BaseModel]) -> str:
    known = ", ".join(model.model_fields)
    if kind == "extra_forbidden":
        return f"unknown; known are {known}"
    if kind == "missing":
        return 'missing; give it, or start from a preset with base = "h100"'
    return message.removeprefix("Value error, ")


def _names(folder: str) -> set[str]:
    entries = files(__package__).joinpath(folder).iterdir()
    return {entry.name[: -len(".toml")] for entry in entries if entry.name.endswith(".toml")}


def _read(folder: str, name: str) -> dict[str, object]:
    text = files(__package__).joinpath(folder, f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
