"""docs/hardware.md has the presets and constants that the data files have."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullbore.cost.hardware import Constants, preset, presets
from fullbore.cost.hardware.device import constants_of

PAGE = (Path(__file__).parents[3] / "docs" / "hardware.md").read_text(encoding="utf-8")
COLUMNS = (
    *("bf16_tflop_per_s", "fp8_tflop_per_s", "memory_gib", "memory_gb_per_s", "node_gb_per_s"),
    *("pair_gb_per_s", "network_gb_per_s", "host_gb_per_s", "gpus_per_node", "multiprocessors"),
)


@pytest.mark.parametrize("name", presets())
def test_presets(name):
    device = preset(name)
    cells = []
    for column in COLUMNS:
        value = getattr(device, column)
        star = "*" if column in device.unofficial else ""
        cells.append("–" if value is None else f"{value:g}{star}")
    assert f"| `{name}` | {device.title} | {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("name", Constants.model_fields)
def test_constants(name):
    values = [getattr(constants_of(each), name) for each in ("ampere", "hopper", "blackwell")]
    told = Constants.model_fields[name].description
    assert f"| `{name}` | {told} | {' | '.join(f'{value:g}' for value in values)} |" in PAGE
