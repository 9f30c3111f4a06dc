"""Stages chained in one process compute what the whole model computes, in every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, make_config, make_model
from torch import nn

from fullbore.errors import ModelError
from fullbore.train.anatomy import examine
from fullbore.train.build import build_stage, empty_model
from fullbore.train.stages import Stage, parts_of, shared_weights
from fullbore.train.weight_files import WeightFiles

CUTS = [(5,), (2, 3), (0, 1, 1, 3, 0)]


def cut(
    model: Any, folder: Path, layers: Sequence[int]
) -> tuple[list[Stage], list[dict[int, str]]]:
    """The model saved, and built again stage by stage."""
    if not folder.exists():
        model.save_pretrained(folder)
    anatomy = examine(empty_model(model.config))
    parts = parts_of(anatomy, layers)
    files = WeightFiles(folder, empty_model(model.config))
    stages = [build_stage(model.config, anatomy, part, weights=files) for part in parts]
    return stages, shared_weights(anatomy, parts)


def chain(stages: Sequence[nn.Module], ids: torch.Tensor) -> torch.Tensor:
    """Forward through detached stages; the returned logits' backward runs through all of them."""
    value = ids
    for stage in stages:
        value = stage(value)
    return value


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
    return (logits * weights).sum()


def gradients_of(stages: Sequence[Stage], shared: list[dict[int, str]]) -> dict[str, torch.Tensor]:
    """Gradients by the model's names, copies of one weight summed."""
    total: dict[str, torch.Tensor] = {}
    for stage in stages:
        names = stage.weight_names()
        for name, weight in stage.named_parameters():
            if weight.grad is not None:
                known = total.get(names[name])
                total[names[name]] = weight.grad if known is None else known + weight.grad
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_gradients_equal_the_whole_model(family: str, tmp_path: Path) -> None:
    model = make_model(family).train()
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = model(input_ids=ids, use_cache=False).logits
    loss_of(wanted).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for layers in CUTS:
        stages, shared = cut(model, tmp_path / "model", layers)
        logits = chain([stage.train() for stage in stages], ids)
        torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-6)
        loss_of(logits).backward()
        found = gradients_of(stages, shared)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=2e-6 * scale + 1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_drawn_weights_do_not_depend_on_the_cut(family: str) -> None:
    config = make_config(family)
    anatomy = examine(empty_model(config))

    def drawn(layers: Sequence[int], seed: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for part in parts_of(anatomy, layers):
            stage = build_stage(config, anatomy, part, weights=None, seed=seed)
            names = stage.weight_names()
            for name, weight in stage.named_parameters():
                if names[name] in found:  # a copy on another stage
                    assert torch.equal(found[names[name]], weight.detach())
                found[names[name]] = weight.detach()
        return found

    whole = drawn((5,), seed=1)
    for layers in CUTS[1:]:
        cut_up = drawn(layers, seed=1)
        assert cut_up.keys() == whole.keys()
        assert all(torch.equal(cut_up[name], whole[name]) for name in whole)
    other = drawn((5,), seed=2)
    assert any(not torch.equal(other[name], whole[name]) for name in whole)
    deviations = {name: w.std().item() for name, w in whole.items() if w.dim() > 1}
    assert all(0 < deviation < 0.03 for deviation in deviations.values()), deviations


def test_scaled_start_of_gpt2_survives() -> None:
    """GPT-2 draws the projections of its residual paths smaller, by its own rule."""
    config = make_config("gpt2", hidden_size=128)
    anatomy = examine(empty_model(config))
    stage = build_stage(config, anatomy, parts_of(anatomy, (5,))[0], weights=None)
    weights = {name.removeprefix("model."): weight for name, weight in stage.named_parameters()}
    scaled = weights["transformer.h.1.mlp.c_proj.weight"].std().item()
    assert scaled == pytest.approx(0.02 / (2 * 5) ** 0.5, rel=0.05)
    assert weights["transformer.h.1.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_a_stage_holds_nothing_of_the_others() -> None:
    config = make_config("llama")
    anatomy = examine(empty_model(config))
    parts = parts_of(anatomy, (2, 2, 1))
    middle = build_stage(config, anatomy, parts[1], weights=None)
    names = set(middle.weight_names().values())
    assert {name.split(".")[2] for name in names} == {"2", "3"}
    assert all(name.startswith("model.layers.") for name in names)
    assert not any(p.is_meta for p in [*middle.parameters(), *middle.buffers()])


def test_tied_weights_are_told_by_stage_and_name() -> None:
    tied = examine(empty_model(make_config("llama")))
    assert shared_weights(tied, parts_of(tied, (2, 2, 1))) == [
        {0: "model.model.embed_tokens.weight", 2: "model.lm_head.weight"}
    ]
    assert shared_weights(tied, parts_of(tied, (5,))) == []
    free = examine(empty_model(make_config("llama", tie_word_embeddings=False)))
    assert shared_weights(free, parts_of(free, (2, 3))) == []


def test_bf16_keeps_rotary_frequencies_exact() -> None:
    config = make_config("llama")
    anatomy = examine(empty_model(config))
    part = parts_of(anatomy, (2, 3))[1]
    stage = build_stage(config, anatomy, part, weights=None, dtype=torch.bfloat16)
    assert {weight.dtype for weight in stage.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in stage.buffers()} == {torch.float32}
    hidden = torch.randn(1, 4, 32, dtype=torch.bfloat16)
    assert stage(hidden).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("layers", "reason"), [((3, 3), "has 5"), ((2, 0, 3), "stage 1 of 3 would be empty")]
)
def test_wrong_numbers_of_layers_are_refused(layers: tuple[int, ...], reason: str) -> None:
    anatomy = examine(empty_model(make_config("llama")))
    with pytest.raises(ModelError, match=reason):
        parts_of(anatomy, layers)


REFUSED = {
    "bart": "behind its last block",
    "t5": "cannot build a causal language model",
    "gemma3": "never uses model.vision_tower",
    "xlm": "several ModuleLists",
    "zamba": "depends on weights outside",
    "xlnet": "belongs to none of its parts",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_not_supported_is_refused_by_name_and_reason(family: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(ModelError, match=REFUSED[family]):
        examine(empty_model(AutoConfig.for_model(family)))


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    wider = make_config("llama", intermediate_size=64)
    anatomy = examine(empty_model(wider))
    files = WeightFiles(tmp_path, empty_model(wider))
    shapes = r"has shape \[32, 48\] in the files and \[32, 64\] in the model"
    with pytest.raises(ModelError, match=shapes):
        build_stage(wider, anatomy, parts_of(anatomy, (5,))[0], weights=files)
    deeper = make_config("llama", num_hidden_layers=6)
    anatomy = examine(empty_model(deeper))
    files = WeightFiles(tmp_path, empty_model(deeper))
    with pytest.raises(
        ModelError, match=r"lacks \d+ weights of the model, such as 'model.layers.5"
    ):
        build_stage(deeper, anatomy, parts_of(anatomy, (6,))[0], weights=files)


def test_unreadable_weights_are_refused(tmp_path: Path) -> None:
    model = empty_model(make_config("llama"))
    with pytest.raises(ModelError, match="no weights to read"):
        WeightFiles(tmp_path, model)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ModelError, match="cannot read the weights"):
        WeightFiles(tmp_path, model)
