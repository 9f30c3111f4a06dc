"""Plans as launch files: one module for each engine that takes them, and for what starts those."""

from fullbore.plan.emit.job import Job, LaunchFile
from fullbore.plan.emit.megatron import layout, megatron_arguments
from fullbore.plan.emit.targets import TARGETS, Targets, launch_files

__all__ = [
    "TARGETS",
    "Job",
    "LaunchFile",
    "Targets",
    "launch_files",
    "layout",
    "megatron_arguments",
]
