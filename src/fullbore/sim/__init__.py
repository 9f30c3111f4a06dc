"""The simulator: schedule and costs in, timeline out, once or with jitter many times."""

from fullbore.sim.engine import simulate
from fullbore.sim.jitter import Spread, spread

__all__ = ["Spread", "simulate", "spread"]
