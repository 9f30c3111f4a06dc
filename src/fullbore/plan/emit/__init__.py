"""Plans as launch files: one module for each that takes them."""

from fullbore.plan.emit.megatron import (
    MEGATRON_SCHEDULES,
    layout,
    megatron_arguments,
    megatron_script,
)

__all__ = ["MEGATRON_SCHEDULES", "layout", "megatron_arguments", "megatron_script"]
