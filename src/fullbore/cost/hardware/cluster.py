"""A cluster: nodes of equal devices, by the name of a preset or from a file.

h100:8x8        8 nodes of 8         h100:64   as many nodes of the preset's size as that takes
cluster.toml    a file: a preset's keys, or `base = "h100"` and what differs; `nodes`
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fullbore.cost.hardware.device import (
    Constants,
    Device,
    checked,
    constants_of,
    preset,
    presets,
)
from fullbore.errors import ConfigError

__all__ = ["Cluster"]

_MOST = 1_000_000  # devices
_GRAMMAR = "write a device and its number, such as h100:8x8 (nodes x GPUs a node) or h100:64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` nodes of `device.gpus_per_node` devices each.

    constants: what they reach of their peaks. name: as it was asked for. Raises ConfigError where
    there are more devices than anybody has.
    """

    name: str
    nodes: int
    device: Device
    constants: Constants

    def __post_init__(self) -> None:
        if self.size > _MOST:
            raise ConfigError(
                f"{self.name}: {self.nodes} nodes of {self.device.gpus_per_node} devices are more "
                f"than {_MOST}: write fewer"
            )

    @property
    def size(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.device.gpus_per_node

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read `h100:8x8`, `h100:64`, `h100`, or the path of a TOML file, `:8x8` behind it too.

        Raises ConfigError that names the field and what would do.
        """
        name, _, count = text.partition(":") if not _is_file(text) else (text, "", "")
        if Path(name).suffix.lower() == ".toml" or _is_file(name):
            base = Cluster.load(name)
        else:
            device = preset(name)
            constants = constants_of(device.generation)
            base = Cluster(name=name, nodes=1, device=device, constants=constants)
        return base if not count else _sized(base, count, text)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a cluster file; ConfigError where it cannot be read or is not one."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:  # ValueError: no text, or no TOML
            raise ConfigError(f"cannot read a cluster from {path}: {error}") from error
        return _from_file(data, where=str(path))


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # longer than a name can be
        return False


def _from_file(data: Mapping[str, object], *, where: str) -> Cluster:
    given = dict(data)
    nodes = given.pop("nodes", 1)
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        raise ConfigError(f"{where}: nodes: {nodes!r} is no number of nodes; write 1 or more")
    own = given.pop("constants", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"{where}: constants: write them as a table, [constants]")
    device = checked(Device, {**_base(given, where), **given}, where=where)
    inherited: dict[str, object] = {}
    if set(own) != set(Constants.model_fields):
        inherited = constants_of(device.generation).model_dump()
    constants = checked(Constants, {**inherited, **own}, where=f"{where}: constants")
    return Cluster(name=where, nodes=nodes, device=device, constants=constants)


def _base(given: dict[str, object], where: str) -> dict[str, object]:
    """The figures of the preset that a file starts from; those it overrides lose their source."""
    base = given.pop("base", None)
    if base is None:
        return {}
    if not isinstance(base, str) or base.lower() not in presets():
        raise ConfigError(f"{where}: base: {base!r} is no preset; known are {', '.join(presets())}")
    figures = preset(base).model_dump(exclude_none=True)
    figures["sources"] = {k: v for k, v in figures["sources"].items() if k not in given}
    figures["unofficial"] = [name for name in figures["unofficial"] if name not in given]
    return figures


def _sized(base: Cluster, count: str, text: str) -> Cluster:
    nodes, per_node = _counts(base, count, text)
    device = base.device.model_copy(update={"gpus_per_node": per_node})
    return Cluster(name=text, nodes=nodes, device=device, constants=base.constants)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(_MOST)) and 0 < int(text) <= _MOST


def _counts(base: Cluster, count: str, text: str) -> tuple[int, int]:
    """Nodes, and devices a node."""
    nodes, cross, per_node = count.partition("x")
    numbers = [nodes, per_node] if cross else [nodes]
    if not all(map(_is_number, numbers)):
        raise ConfigError(
            f"--cluster {text[:60]}: {count[:60]!r} is no number of devices; {_GRAMMAR}"
        )
    if cross:
        return int(nodes), int(per_node)
    total, size = int(nodes), base.device.gpus_per_node
    if total <= size:
        return 1, total
    if total % size:
        low, high = total // size * size, -(-total // size) * size
        raise ConfigError(
            f"--cluster {text}: {total} devices are no whole number of nodes of {size}; write "
            f"{low} or {high}, or nodes x devices a node"
        )
    return total // size, size
