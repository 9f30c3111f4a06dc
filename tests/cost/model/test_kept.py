"""Bytes kept are those that autograd saves in a forward of small real models."""

from __future__ import annotations

from functools import partial

import pytest
from priced import priced

from fullbore.cost.model import Kernels, Precision, Recompute
from fullbore.cost.model.totals import totals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from real_models import FAMILIES, real, small_config  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.slow

BATCH, SEQUENCE = 2, 64
NONE = Recompute()
NO_DROPOUT = dict.fromkeys(
    (
        "attention_dropout",
        "attn_pdrop",
        "dropout",
        "embd_pdrop",
        "hidden_dropout",
        "resid_pdrop",
        "residual_dropout",
    ),
    0.0,
)
# No such attention, or in Falcon one that torch carries out without flash attention.
WITHOUT_FLASH = ("bloom", "falcon", "gemma2", "gpt_oss")
CLOSER = {
    "gpt2": 0.0015,  # its norms keep 16-bit statistics on a CPU, 32-bit ones on a GPU
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3"), 0.0005),
}
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


def told(config, *, precision: str, attention: str, recompute: Recompute = NONE):
    """Pieces at the price of an implementation that fuses nothing."""
    return priced(
        config.to_dict(),
        sequence=SEQUENCE,
        microbatch=BATCH,
        precision=Precision.named(precision),
        recompute=recompute,
        kernels=Kernels(style="eager", flash=attention == "sdpa"),
    )


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_kept_bytes_of_a_family(family, precision):
    config = small_config(family, FAMILIES[family][0], **NO_DROPOUT)
    for attention in ("eager", "sdpa"):
        if attention == "sdpa" and family in WITHOUT_FLASH:
            continue
        model = real(config, dtype=PRECISIONS[precision], attention=attention)
        kept = totals(told(config, precision=precision, attention=attention)).kept_bytes
        within = CLOSER.get(family, 0.005)
        assert kept == pytest.approx(saved_bytes(model), rel=within), attention


@pytest.mark.parametrize(("family", "module"), [("llama", "mlp"), ("mixtral", "moe")])
def test_kept_bytes_where_a_module_is_made_again(family, module):
    config = small_config(family, FAMILIES[family][0], **NO_DROPOUT)
    model = real(config, dtype=torch.bfloat16, attention="sdpa")
    for layer in model.model.layers:
        layer.mlp.forward = partial(checkpoint, layer.mlp.forward, use_reentrant=True)
    again = Recompute().changed("selective", modules=(module,))
    pieces = told(config, precision="bf16", attention="sdpa", recompute=again)
    assert totals(pieces).kept_bytes == pytest.approx(saved_bytes(model), rel=0.0005)


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_kept_bytes_of_gpt2_with_dropout(precision):
    config = small_config("gpt2", FAMILIES["gpt2"][0])
    model = real(config, dtype=PRECISIONS[precision])
    pieces = told(config, precision=precision, attention="eager")
    # A CPU keeps a mask as numbers of the activations' type, a GPU (which is priced) as bytes.
    masks = sum(t.elements for p in pieces for t in p.kept if t.name.endswith("dropout mask"))
    wider = masks * (PRECISIONS[precision].itemsize - 1)
    assert totals(pieces).kept_bytes + wider == pytest.approx(saved_bytes(model), rel=0.005)
    assert masks > BATCH * SEQUENCE * 128 * 7
