"""The precision of a model, as a name or as Megatron-LM's switches say it."""

from __future__ import annotations

from typing import Annotated

import typer

from fullbore.errors import ConfigError

__all__ = ["Bf16", "Fp8", "Fp8Mx", "Fp8Weights", "Fp16", "Fp32", "PrecisionName", "precision_name"]

_PANEL = "Precision"
_FLAGS = {"fp8_weights": "--fp8-param-gather", "fp8_mx": "--mxfp8"}

PrecisionName = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="bf16 (if none is given), fp16, fp8, fp8_mx, fp8_weights or fp32.",
        rich_help_panel=_PANEL,
    ),
]
Bf16 = Annotated[
    bool,
    typer.Option("--bf16", help="16-bit weights and activations.", rich_help_panel=_PANEL),
]
Fp16 = Annotated[
    bool, typer.Option("--fp16", help="The same with another exponent.", rich_help_panel=_PANEL)
]
Fp32 = Annotated[bool, typer.Option("--fp32", help="32 bits everywhere.", rich_help_panel=_PANEL)]
Fp8 = Annotated[
    bool,
    typer.Option(
        "--fp8",
        help="8-bit inputs of products; weights stay in 16 bits.",
        rich_help_panel=_PANEL,
    ),
]
Fp8Mx = Annotated[
    bool,
    typer.Option(
        "--mxfp8",
        help="The same with a scale for each 32 elements.",
        rich_help_panel=_PANEL,
    ),
]
Fp8Weights = Annotated[
    bool,
    typer.Option(
        "--fp8-param-gather",
        help="8-bit weights and inputs of products.",
        rich_help_panel=_PANEL,
    ),
]


def precision_name(name: str | None, **switches: bool) -> str | None:
    """The one that is given, by its name or by its switch; ConfigError where several are."""
    given = [known for known, is_given in switches.items() if is_given]
    if len(given) + (name is not None) > 1:
        flags = [_FLAGS.get(known, f"--{known}") for known in given]
        named = [] if name is None else [f"--precision {name[:60]}"]
        raise ConfigError(f"{' and '.join([*flags, *named])}: give one precision")
    return given[0] if given else name
