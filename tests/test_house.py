"""The size rules of the house: modules under 400 lines, functions of at most 60."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fullbore"
FILES = sorted(SOURCE.rglob("*.py"))


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_modules_and_functions_stay_small(file):
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") < 400
    for function in functions(tree):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
        assert lines <= 60, f"{function.name} has {lines} lines"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_every_module_opens_with_a_sentence(file):
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    assert docstring, "say in one sentence what the module is"
    assert docstring.splitlines()[0].rstrip().endswith((".", ":", "?"))
