"""One job under several schedules: what was measured, what is predicted from it, and the report.

Nothing here knows torch: ranks hand over measurements, and everything that follows is arithmetic
and text, so it is tested without a process.
"""

from fullbore.compare.measurement import Length, Measurement, Setting, Training
from fullbore.compare.outcome import Figures, Outcome, assess

__all__ = ["Figures", "Length", "Measurement", "Outcome", "Setting", "Training", "assess"]
