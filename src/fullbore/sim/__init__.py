"""The simulator: schedule and costs in, timeline out."""

from fullbore.sim.engine import simulate

__all__ = ["simulate"]
