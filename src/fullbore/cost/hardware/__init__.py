"""What a cluster gives: devices, who shares a node with whom, and seconds of what a model costs."""

from fullbore.cost.hardware.assemble import stage_costs
from fullbore.cost.hardware.capture import Capture
from fullbore.cost.hardware.cluster import Cluster
from fullbore.cost.hardware.device import GIB, Constants, Device, preset, preset_in, presets
from fullbore.cost.hardware.layout import Layout
from fullbore.cost.hardware.links import Ring
from fullbore.cost.hardware.roofline import Overlap, Priced, Roofline, Seconds
from fullbore.cost.hardware.step import optimizer_s

__all__ = [
    "GIB",
    "Capture",
    "Cluster",
    "Constants",
    "Device",
    "Layout",
    "Overlap",
    "Priced",
    "Ring",
    "Roofline",
    "Seconds",
    "optimizer_s",
    "preset",
    "preset_in",
    "presets",
    "stage_costs",
]
