"""Parameters are those of the real models: of every family, and of the known ones at full size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from priced import example, priced

from fullbore.cost.model.families import known
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.totals import parameters
from fullbore.errors import ModelError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from real_models import FAMILIES, empty, small_config  # noqa: E402

pytestmark = pytest.mark.slow

# As their authors or their weight files state them; DeepSeek-V3 less its 14 848 score corrections,
# which no gradient trains.
STATED = {
    "deepseek-v3": 671_026_404_352,
    "gpt2": 124_439_808,
    "llama3-405b": 405_853_388_800,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
}


def counted(model) -> int:
    return sum(weight.numel() for weight in model.parameters())


def blocks(model):
    """The layers of a model: its first list of modules."""
    return next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))


def test_every_family_is_tried():
    assert set(FAMILIES) == set(known())
    assert len(FAMILIES) >= 10


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parameters_of_a_family(family):
    for extra in FAMILIES[family]:
        config = small_config(family, extra)
        model, pieces = empty(config), priced(config.to_dict(), sequence=128)
        assert parameters(pieces) == counted(model), extra
        for layer, piece in zip(blocks(model), pieces[1:-1], strict=True):
            assert piece.parameters == counted(layer), extra


@pytest.mark.parametrize("name", sorted(STATED))
def test_parameters_at_full_size(name):
    from transformers import AutoConfig

    config = example(name)
    assert parameters(priced(config, sequence=1024)) == STATED[name]
    made = AutoConfig.for_model(**config)
    assert parameters(priced(made.to_dict(), sequence=1024)) == counted(empty(made)) == STATED[name]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_key_left_out_is_refused_by_name_or_means_what_transformers_makes_of_it(family):
    from transformers import AutoConfig

    usual = AutoConfig.for_model(family).to_dict()
    for extra in FAMILIES[family]:
        told = small_config(family, extra).to_dict()
        for key in [key for key in told if told[key] != usual.get(key)]:
            rest = {name: value for name, value in told.items() if name != key}
            try:
                found = shape_of(rest)
            except ModelError as error:
                assert key in str(error)
                continue
            meant = shape_of(AutoConfig.for_model(**rest).to_dict())
            assert found == replace(meant, mtp_layers=found.mtp_layers), key
