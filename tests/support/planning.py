"""A small model on a small cluster, so that whole plans take fractions of a second."""

from __future__ import annotations

from typing import Any

from fullbore.cost.hardware import Cluster
from fullbore.cost.model.hugging_face import shape_of
from fullbore.plan import Fixed, Question

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def ask(
    *, cluster: str = "h100:1x4", config: dict[str, Any] | None = None, **more: Any
) -> Question:
    """A question, such as `ask(pipeline=(4,), memory_limit_bytes=8e9)`: fixed flags by name."""
    own = {"global_batch": 16, "sequence": 1024}
    fixed = {key: more.pop(key) for key in list(more) if key in Fixed.__slots__}
    return Question(
        shape=shape_of({**LLAMA, **(config or {})}),
        cluster=Cluster.parse(cluster),
        fixed=Fixed(**fixed),
        **{**own, **more},
    )
