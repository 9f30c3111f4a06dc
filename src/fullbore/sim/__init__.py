"""The simulator: schedule and costs in, timeline out."""

from fullbore.sim.simulate import simulate

__all__ = ["simulate"]
