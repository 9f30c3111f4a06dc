"""README.md and docs/ are true: commands print what stands there, links lead somewhere."""

from __future__ import annotations

import re
import shutil

import pytest
from golden import DOCUMENTS, EXAMPLES, IMAGES, ROOT, run, steps

from fullbore.schedules import FAMILIES

OLDER = ("gpipe", "1f1b", "interleaved", "looped-bfs")  # shown in the README and the tutorial
NAMES = [document.name for document in DOCUMENTS]


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_commands_print_what_the_document_says(document, tmp_path):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    for step in steps(document.read_text(encoding="utf-8")):
        if not step.trains:
            printed = run(step.command, tmp_path)
            assert printed == step.output, f"{document.name}:{step.line}: {step.command}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_python_without_torch_runs_and_prints_what_its_comments_say(document, tmp_path):
    text = document.read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if "import" in block and "torch" not in block and "Pipeline" not in block:
            (tmp_path / "block.py").write_text(block, encoding="utf-8")
            for printed in run("python block.py", tmp_path).splitlines():
                assert f"# {printed}" in block


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert (document.parent / target).exists(), f"{document.name} points at {target}"


@pytest.mark.parametrize("image", IMAGES)
def test_pictures_are_what_show_draws_now(image, tmp_path):
    run(f"fullbore show {IMAGES[image]} -o {image}", tmp_path)
    drawn = (tmp_path / image).read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs" / "images" / image).read_text(encoding="utf-8")


def test_the_readme_says_what_every_package_is():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for entry in (ROOT / "src" / "fullbore").iterdir():
        if entry.is_dir() and entry.name != "__pycache__":
            assert re.search(rf"^  {entry.name}/ +\w", readme, re.MULTILINE), entry.name


def test_the_page_of_schedules_has_the_formulas_of_the_table():
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        row = f"| `{family.name}` | {family.bubble} | {family.memory} | {family.holds} |"
        assert row in page
        assert f"fullbore show {family.name} " in page or family.name in OLDER


def test_files_named_in_the_readme_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", readme)
    assert len(named) >= 5
    for name in named:
        assert (ROOT / "src" / "fullbore" / name).exists(), name


def test_commands_are_found_in_documents():
    text = "a\n```console\n$ fullbore one\nsaid\n$ fullbore train x\n```\n```sh\n$ no\n```\n"
    first, second = steps(text)
    assert (first.line, first.command, first.output) == (3, "fullbore one", "said\n")
    assert (second.line, second.trains, first.trains) == (5, True, False)
