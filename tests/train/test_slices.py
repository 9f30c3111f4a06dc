"""Stages of language models slice by slice: what the whole sequence gives, in every family."""

from __future__ import annotations

from functools import partial

import pytest
import slice_models as jobs
import torch
from ranks import run_ranks as run_ranks_for
from slice_jobs import Case
from tiny_models import FAMILIES
from transformers import AutoConfig

from fullbore.errors import ModelError
from fullbore.train.anatomy import examine
from fullbore.train.build import empty_model
from fullbore.train.carried import carried_in, check_slices
from fullbore.train.stages import parts_of

run_ranks = partial(run_ranks_for, timeout_s=100)
LAYERS = (0, 2, 3)
EAGER = ["bloom", "gemma2", "gpt2", "llama"]  # two of them have nothing else
SDPA = [family for family in FAMILIES if family not in ("bloom", "gemma2")]
IN_32_BITS = ["mixtral", "deepseek_v3"]  # torch's grouped products take no others


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "sdpa") for family in SDPA), *((family, "eager") for family in EAGER)],
)
def test_slices_give_the_logits_of_whole_sequences(family: str, attention: str) -> None:
    dtype = torch.float32 if family in IN_32_BITS else torch.float64
    config = jobs.config_of(family, attention)
    anatomy = examine(empty_model(config))
    ids = torch.randint(3, 61, (2, 10), generator=torch.Generator().manual_seed(1))
    value: torch.Tensor = ids
    pieces: tuple[torch.Tensor, ...] = ids.split((4, 1, 5), dim=1)
    with torch.no_grad():
        for part in parts_of(anatomy, LAYERS):
            stage = jobs.stage_of(config, part, dtype)
            value, carry, outputs = stage(value), (), []
            for piece in pieces:
                output, carry = stage(piece, carry=carry)
                outputs.append(output)
            pieces = tuple(outputs)
    found = torch.cat(pieces, dim=1)
    assert value.std() > 1e-3
    # eager attention takes its softmax in 32 bits, whatever the model's type
    close = 1e-12 if (dtype, attention) == (torch.float64, "sdpa") else 1e-5
    assert float((found - value).abs().max() / value.abs().max()) < close


@pytest.mark.slow
def test_gradients_equal_those_of_whole_sequences() -> None:
    families = [("llama", "sdpa"), ("gpt2", "sdpa")]
    cases = [Case(3, 4), Case(2, 2, split=True, recompute="full")]
    for found in run_ranks(jobs.compare, 2, families, cases):
        assert len(found) == len(families) * len(cases)
        for what, (off, loss_off) in found.items():
            assert off <= 1e-12 and loss_off <= 1e-12, (what, off, loss_off)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("mamba", "it has layers of type linear_attention"),
        ("openai-gpt", "its forward takes no cache"),
    ],
)
def test_models_that_keep_no_keys_are_refused_by_name(kind: str, reason: str) -> None:
    model = empty_model(AutoConfig.for_model(kind, num_hidden_layers=2))
    name = type(model).__name__
    with pytest.raises(ModelError, match=f"^{name} cannot run on sequences in .*, since {reason}"):
        check_slices(model)
    check_slices(empty_model(jobs.config_of("gemma3_text", "sdpa")))


class Forgetful:
    """A cache that keeps nothing of any layer."""

    layers: tuple[()] = ()


def test_a_model_that_keeps_no_keys_is_refused_by_layer() -> None:
    with pytest.raises(ModelError, match=r"layer 2 does not keep keys and values .* choose a"):
        carried_in(Forgetful(), [2], tokens=4)
