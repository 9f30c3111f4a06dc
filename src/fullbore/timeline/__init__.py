"""What happened when, simulated or measured, and the figures that follow from it."""

from fullbore.timeline.critical import critical_path
from fullbore.timeline.live import Curve, live_curves
from fullbore.timeline.metrics import Summary, summarize
from fullbore.timeline.slack import Transit, slack
from fullbore.timeline.timeline import Span, Timeline

__all__ = [
    "Curve",
    "Span",
    "Summary",
    "Timeline",
    "Transit",
    "critical_path",
    "live_curves",
    "slack",
    "summarize",
]
