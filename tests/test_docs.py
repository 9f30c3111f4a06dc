"""The commands in README.md and docs/ are run, and print what the documents say they print.

A block marked `console` holds commands after `$ ` and their output. Commands that train are left
to the tests of training; a block marked `sh` is never run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TRAINS = re.compile(r"fullbore (train|export|compare)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a document and the output printed beneath it."""

    line: int
    command: str
    output: str


def steps(document: Path) -> list[Step]:
    """The commands of a document that can be run without torch, in order."""
    text = document.read_text(encoding="utf-8")
    found = []
    for block in re.finditer(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text[: block.start()].count("\n") + 2
        for part in re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if not TRAINS.search(command):
                found.append(Step(line=line, command=command, output=output))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_commands_print_what_the_document_says(document, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for step in steps(document):
        ran = subprocess.run(
            ["bash", "-c", step.command],
            cwd=tmp_path,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=50,
        )
        assert ran.stdout == step.output, f"{document.name}, line {step.line}: {step.command}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_between_documents_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert (document.parent / target).exists(), f"{document.name} points at {target}"


def test_the_documents_have_commands():
    assert sum(len(steps(document)) for document in DOCUMENTS) >= 8


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
