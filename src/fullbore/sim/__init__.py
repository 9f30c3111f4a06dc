"""The simulator: schedule and costs in, timeline out, once or with jitter many times."""

from fullbore.sim.engine import simulate
from fullbore.sim.jitter import Spread, spread
from fullbore.sim.memory import memory_curves

__all__ = ["Spread", "memory_curves", "simulate", "spread"]
