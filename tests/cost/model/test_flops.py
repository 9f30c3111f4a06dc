"""FLOPs are those that torch counts in a forward and a backward of small real models."""

from __future__ import annotations

import pytest
from priced import priced

from fullbore.cost.model.totals import totals

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from real_models import FAMILIES, real, small_config  # noqa: E402

pytestmark = pytest.mark.slow

BATCH, SEQUENCE = 2, 32


def counted(model) -> tuple[int, int]:
    """FLOPs of the forward and of the backward."""
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(3, 512, (BATCH, SEQUENCE))
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_flops_of_a_family(family):
    extra = FAMILIES[family][0]
    model = real(small_config(family, extra))
    # torch counts attention whole: no half for the mask, and no window.
    told = totals(
        priced(
            {**model.config.to_dict(), "sliding_window": None},
            sequence=SEQUENCE,
            microbatch=BATCH,
            causal=False,
        )
    )
    forward, backward = counted(model)
    assert told.forward_flops == forward
    assert told.input_grad_flops + told.weight_grad_flops == backward
