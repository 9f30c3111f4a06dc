"""Which model of torchtitan's own a shape is.

torchtitan trains the models of its registry, by name and flavor. Source: torchtitan 0.2.2,
`models/llama3/__init__.py`, `models/qwen3/__init__.py`, `models/deepseek_v3/__init__.py`, those
of its families that a pipeline can be cut from.
"""

from __future__ import annotations

from typing import NamedTuple

from fullbore.cost.model import ModelShape
from fullbore.cost.model.shape import Attention, Experts

__all__ = ["UNKNOWN", "model_of"]

UNKNOWN = "name-of-your-model", "its-flavor"


class _Sizes(NamedTuple):
    """Layers, hidden, heads, groups (0: latent), width of an MLP or an expert, experts, V."""

    layers: int
    hidden: int
    heads: int
    groups: int
    width: int
    experts: int
    vocab: int


_LLAMA, _QWEN, _DEEPSEEK = "llama3", "qwen3", "deepseek_v3"
_MODELS: dict[_Sizes, tuple[str, str]] = {
    _Sizes(32, 4096, 32, 8, 14336, 0, 128256): (_LLAMA, "8B"),
    _Sizes(80, 8192, 64, 8, 28672, 0, 128256): (_LLAMA, "70B"),
    _Sizes(126, 16384, 128, 8, 53248, 0, 128256): (_LLAMA, "405B"),
    _Sizes(28, 1024, 16, 8, 3072, 0, 151936): (_QWEN, "0.6B"),
    _Sizes(28, 2048, 16, 8, 6144, 0, 151936): (_QWEN, "1.7B"),
    _Sizes(36, 2560, 32, 8, 9728, 0, 151936): (_QWEN, "4B"),
    _Sizes(36, 4096, 32, 8, 12288, 0, 151936): (_QWEN, "8B"),
    _Sizes(40, 5120, 40, 8, 17408, 0, 151936): (_QWEN, "14B"),
    _Sizes(64, 5120, 64, 8, 25600, 0, 151936): (_QWEN, "32B"),
    _Sizes(48, 2048, 32, 4, 768, 128, 151936): (_QWEN, "30B-A3B"),
    _Sizes(94, 4096, 64, 4, 1536, 128, 151936): (_QWEN, "235B-A22B"),
    _Sizes(27, 2048, 16, 0, 1408, 64, 102400): (_DEEPSEEK, "16B"),
    _Sizes(60, 5120, 128, 0, 1536, 160, 102400): (_DEEPSEEK, "236B"),
    _Sizes(61, 7168, 128, 0, 2048, 256, 129280): (_DEEPSEEK, "671B"),
}


def model_of(shape: ModelShape) -> tuple[str, str]:
    """Name and flavor, or two that torchtitan refuses where it has no model of this shape."""
    name, flavor = _MODELS.get(_sizes(shape), UNKNOWN)
    attention = shape.layers[0].attention
    normed = isinstance(attention, Attention) and attention.qk_norm != "none"
    if name in (_LLAMA, _QWEN) and normed != (name == _QWEN):
        return UNKNOWN
    return name, flavor


def _sizes(shape: ModelShape) -> _Sizes:
    last = shape.layers[-1]
    attention, mlp = last.attention, last.mlp
    return _Sizes(
        layers=len(shape.layers),
        hidden=shape.hidden,
        heads=attention.heads,
        groups=attention.groups if isinstance(attention, Attention) else 0,
        width=mlp.width,
        experts=mlp.count if isinstance(mlp, Experts) else 0,
        vocab=shape.vocab,
    )
