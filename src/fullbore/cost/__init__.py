"""What actions cost, in seconds and bytes: given, measured, or computed from a model's shape."""

from fullbore.cost.costs import Costs, StageCosts

__all__ = ["Costs", "StageCosts"]
