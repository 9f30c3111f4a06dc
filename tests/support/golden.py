"""Documents and examples with golden output: how they are found, run and renewed.

`scripts/golden` runs this file: it writes what the commands print now into README.md, docs/ and
examples/*.out, and redraws docs/images. Read the difference before committing it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RUNNERS = {".py": "python", ".sh": "bash"}
# What runs has a golden output beside it; two_ranks.py is only called by pipeline.sh.
SCRIPTS = sorted(
    file
    for file in EXAMPLES.iterdir()
    if file.suffix in RUNNERS and file.with_suffix(".out").exists()
)
IMAGES = {
    "interleaved.svg": "interleaved -p 4 -m 8 -v 2 --forward-s 0.5 --backward-s 1",
    "offload.svg": "1f1b -p 4 -m 8 --offload 1 --offload-s 0.8",
}

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TRAINS = re.compile(r"fullbore (train|export|compare)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a document's `console` blocks, with the output printed beneath it."""

    line: int
    command: str
    output: str

    @property
    def trains(self) -> bool:
        """Whether it needs torch, and is left to the tests of training."""
        return bool(_TRAINS.search(self.command))


def steps(text: str) -> list[Step]:
    """The commands of a document, in order."""
    found = []
    for block in _BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 2
        for part in re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append(Step(line=line, command=command, output=output))
            line += part.count("\n")
    return found


def run(command: str, folder: Path) -> str:
    """Run a shell command in a folder; returns stdout and stderr as they came."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "COLUMNS": "90", "NO_COLOR": "1", "TERM": "dumb"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=55,
    ).stdout


def run_script(script: Path, folder: Path) -> str:
    """Run a copy of an example in a folder of its own."""
    copies = shutil.copytree(EXAMPLES, folder / "examples")
    return run(f"{RUNNERS[script.suffix]} {script.name}", Path(copies))


def renew() -> None:
    """Write what is printed and drawn now into documents, examples and pictures."""
    for image, arguments in IMAGES.items():
        run(f"fullbore show {arguments} -o docs/images/{image}", ROOT)
    for script in SCRIPTS:
        with tempfile.TemporaryDirectory() as folder:
            script.with_suffix(".out").write_text(run_script(script, Path(folder)))
    for document in DOCUMENTS:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(EXAMPLES, Path(folder) / "examples")
            document.write_text(_renewed(document.read_text(encoding="utf-8"), Path(folder)))


def _renewed(text: str, folder: Path) -> str:
    def block(match: re.Match[str]) -> str:
        parts = (
            f"$ {step.command}\n{step.output if step.trains else run(step.command, folder)}"
            for step in steps(match[0])
        )
        return f"```console\n{''.join(parts)}```"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    renew()
