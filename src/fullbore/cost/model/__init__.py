"""What a model costs, from its shape: parameters, products, bytes kept and messages, per layer."""

from fullbore.cost.model.piece import Collective, Kept, Piece, Product, Traffic, Weights
from fullbore.cost.model.shape import ModelShape
from fullbore.cost.model.split import CORE, RECOMPUTE_MODULES, Kernels, Precision, Recompute, Split

__all__ = [
    "CORE",
    "RECOMPUTE_MODULES",
    "Collective",
    "Kept",
    "Kernels",
    "ModelShape",
    "Piece",
    "Precision",
    "Product",
    "Recompute",
    "Split",
    "Traffic",
    "Weights",
]
