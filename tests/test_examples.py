"""Every example prints exactly what lies beside it in its .out file."""

from __future__ import annotations

import pytest
from golden import SCRIPTS, run_script


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_example_prints_its_golden_output(script, tmp_path):
    expected = script.with_suffix(".out").read_text(encoding="utf-8")
    assert run_script(script, tmp_path) == expected


def test_there_are_examples():
    assert len(SCRIPTS) >= 3
