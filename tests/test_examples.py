"""Every example prints exactly what lies beside it in its .out file."""

from __future__ import annotations

import pytest
from golden import SCRIPTS, run_script


def _parameter(script):
    slow = "torchrun" in script.read_text(encoding="utf-8")
    return pytest.param(script, id=script.name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("script", [_parameter(script) for script in SCRIPTS])
def test_the_example_prints_its_golden_output(script, tmp_path):
    if "torchrun" in script.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    expected = script.with_suffix(".out").read_text(encoding="utf-8")
    assert run_script(script, tmp_path) == expected


def test_there_are_examples():
    assert {script.name for script in SCRIPTS} >= {"bubbles.py", "own_schedule.sh", "pipeline.sh"}
