"""Every example runs and prints exactly what lies beside it in its .out file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
RUNNERS = {".py": sys.executable, ".sh": "bash"}
SCRIPTS = sorted(file for file in EXAMPLES.iterdir() if file.suffix in RUNNERS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_the_example_prints_its_golden_output(script, tmp_path):
    copies = shutil.copytree(EXAMPLES, tmp_path / "examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        [RUNNERS[script.suffix], script.name],
        cwd=copies,
        env={**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=55,
    )
    assert ran.stdout == script.with_suffix(".out").read_text(encoding="utf-8")
    assert ran.returncode == 0


def test_there_are_examples():
    assert len(SCRIPTS) >= 3
