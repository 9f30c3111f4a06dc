"""The simulator: schedule and costs in, timeline out, once or with jitter many times."""

from fullbore.sim.engine import simulate
from fullbore.sim.jitter import Spread, spread
from fullbore.sim.memory import memory_curves
from fullbore.sim.rehearsal import Rehearsal

__all__ = ["Rehearsal", "Spread", "memory_curves", "simulate", "spread"]
