"""Bytes kept are those that autograd saves in a forward of small real models."""

from __future__ import annotations

import pytest
from priced import priced

from fullbore.cost.model import Kernels, Precision
from fullbore.cost.model.totals import totals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from real_models import FAMILIES, real, small_config  # noqa: E402

pytestmark = pytest.mark.slow

BATCH, SEQUENCE = 2, 64
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def saved_bytes(model) -> int:
    """Memory of all tensors that the graph holds, each storage once, parameters aside."""
    storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    sizes: dict[int, int] = {}
    held = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no address is used twice
        return tensor

    ids = torch.randint(3, 512, (BATCH, SEQUENCE))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(sizes.values())


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "mixtral"])
def test_kept_bytes_of_a_family(family, attention, precision):
    config = small_config(family, FAMILIES[family][0])
    model = real(config, dtype=PRECISIONS[precision], attention=attention)
    told = totals(
        priced(
            config.to_dict(),
            sequence=SEQUENCE,
            microbatch=BATCH,
            precision=Precision.named(precision),
            kernels=Kernels(style="eager", flash=attention == "sdpa"),
        )
    )
    assert told.kept_bytes == pytest.approx(saved_bytes(model), rel=0.02)
