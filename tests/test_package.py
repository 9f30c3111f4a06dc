"""What the package promises as a whole: no torch where none is needed, and guarded names."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fullbore

ROOT = Path(__file__).parents[1]

# Packages that know torch; the others are imported here even where torch is missing.
WITH_TORCH = ("fullbore.runtime", "fullbore.train")

# Makes an import of torch, or of what only training needs, an error that names the importer.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} must not be imported here")

sys.meta_path.insert(0, Blocker())
"""
TRAINING = ("accelerate", "gguf", "huggingface_hub", "safetensors", "torch", "transformers", "yaml")


def run_blocked(code: str, blocked: tuple[str, ...], cwd: Path) -> subprocess.CompletedProcess:
    """Run code in a fresh Python in which the blocked packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
    )


def command(*arguments: str) -> str:
    return f"from fullbore.cli.main import main\nmain({list(arguments)!r})\n"


def test_the_blocker_blocks(tmp_path):
    ran = run_blocked("import torch.nn", TRAINING, tmp_path)
    assert ran.returncode == 1
    assert "torch must not be imported here" in ran.stderr


def test_import_fullbore_needs_no_torch(tmp_path):
    needing = {"Pipeline", "PostValidatedOptimizer", "runtime", "train"}
    names = sorted(set(fullbore.__all__) - needing)
    used = f"import fullbore\nfor name in {names!r}: getattr(fullbore, name)\n"
    ran = run_blocked(used, TRAINING, tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["schedules"],
        ["schedules", "--json"],
        ["show", "gpipe", "-p", "2", "-m", "4"],
        ["show", "1f1b", "-p", "2", "-m", "4", "--communication", "-o", "-"],
        ["show", "1f1b", "-p", "2", "-m", "4", "-o", "picture.svg"],
        ["show", "1f1b", "-p", "2", "-m", "4", "-o", "picture.html"],
        ["show", "1f1b", "-p", "2", "-m", "4", "-o", "trace.pftrace"],
        ["show", "1f1b", "-p", "2", "-m", "4", "-o", "spans.json"],
        ["simulate", "interleaved", "-p", "2", "-m", "4"],
        ["simulate", "looped-bfs", "-p", "16", "-m", "512", "-v", "4", "--json"],
        ["model", str(ROOT / "examples" / "configs" / "mixtral-8x7b"), "--explain"],
        ["model", "--megatron", str(ROOT / "examples" / "configs" / "gpt3-175b.sh"), "--json"],
        ["train", "--help"],
        ["compare", "--help"],
        ["calibrate", "--help"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_commands_that_do_not_train_need_no_torch(arguments, tmp_path):
    ran = run_blocked(command(*arguments), TRAINING, tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_checking_a_file_needs_no_torch(tmp_path):
    fullbore.schedules.one_f_one_b(ranks=2, microbatches=4).to_csv(tmp_path / "schedule.csv")
    ran = run_blocked(command("check", "schedule.csv"), TRAINING, tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "name",
    [
        *("", "show", "simulate", "search", "plan", "check"),
        *("schedules", "model", "train", "compare", "calibrate"),
    ],
)
def test_help_loads_nothing_heavy(name, tmp_path):
    heavy = (*TRAINING, "numba", "numpy", "perfetto", "rich")
    ran = run_blocked(command(*filter(None, [name]), "--help"), heavy, tmp_path)
    assert ran.returncode == 0, ran.stderr


def modules() -> list[str]:
    """Every module of the package, private ones aside."""
    found = pkgutil.walk_packages(fullbore.__path__, "fullbore.")
    return [module.name for module in found if module.name != "fullbore.__main__"]


@pytest.mark.parametrize("name", modules())
def test_all_public_names_exist(name):
    if name.startswith(WITH_TORCH):
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    if name == "fullbore.cli":
        return  # a package of commands, which exports nothing itself
    exported = module.__all__
    assert len(set(exported)) == len(exported)
    for public in exported:
        assert hasattr(module, public), f"{name}.__all__ names {public}, which does not exist"


def test_the_front_door_exports_what_it_says():
    classes = {"Costs", "FullboreError", "Pipeline", "PostValidatedOptimizer", "Schedule"}
    classes |= {"Timeline"}
    packages = {
        *("cost", "ir", "megatron", "passes", "plan", "runtime", "schedules"),
        *("search", "sim", "timeline", "train", "verify", "view"),
    }
    assert set(fullbore.__all__) == classes | packages
    assert set(fullbore.__all__) <= set(dir(fullbore))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'pipelines'"):
        fullbore.pipelines  # noqa: B018


def test_python_m_fullbore_is_the_command():
    ran = subprocess.run(
        [sys.executable, "-m", "fullbore", "--version"], capture_output=True, text=True, timeout=50
    )
    assert ran.stdout == f"fullbore {fullbore.__version__}\n"


def test_only_light_packages_are_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {line.split(">")[0] for line in project["dependencies"]}
    assert required.isdisjoint(TRAINING)
    assert "torch>=2.9" in project["optional-dependencies"]["train"]
