"""Pricing in one line, for the tests of `fullbore.cost.model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fullbore.cost.model import Kernels, ModelShape, Piece, Precision, Recompute, Split
from fullbore.cost.model.hugging_face import shape_of
from fullbore.cost.model.layer import pieces

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def example(name: str) -> dict[str, Any]:
    """The configuration of a folder in examples/configs."""
    found: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return found


def priced(model: dict[str, Any] | ModelShape, **changes: Any) -> tuple[Piece, ...]:
    """Pieces of a configuration: one rank, bf16, fused kernels with flash, nothing recomputed."""
    shape = model if isinstance(model, ModelShape) else shape_of(model)
    options: dict[str, Any] = {
        "sequence": 4096,
        "microbatch": 1,
        "recompute": Recompute(),
        "precision": Precision.named("bf16"),
        "causal": True,
        "kernels": Kernels(),
        **changes,
    }
    return pieces(shape, options.pop("split", Split()), **options)


def kept(piece: Piece) -> dict[str, float]:
    """Bytes of what a piece keeps, by the name of the tensor."""
    return {tensor.name: tensor.bytes for tensor in piece.kept}
