"""Fullbore: pipeline-parallel training of large language models with the pipe running full.

    import fullbore

    schedule = fullbore.schedules.one_f_one_b(ranks=4, microbatches=8)
    pipe = fullbore.Pipeline(stages={0: module}, schedule=schedule, loss_fn=loss_fn)

Names are imported when first used, so that `import fullbore` and everything that does not train
works, and starts fast, where torch is not installed.
"""

from __future__ import annotations

from importlib import import_module

from fullbore.errors import FullboreError

TYPE_CHECKING = False  # typing would delay the moment from which Ctrl-C is quiet
if TYPE_CHECKING:
    from fullbore import (
        cost,
        ir,
        megatron,
        passes,
        plan,
        runtime,
        schedules,
        search,
        sim,
        timeline,
        train,
        verify,
        view,
    )
    from fullbore.cost import Costs
    from fullbore.ir import Schedule
    from fullbore.runtime import Pipeline, PostValidatedOptimizer
    from fullbore.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "Costs",
    "FullboreError",
    "Pipeline",
    "PostValidatedOptimizer",
    "Schedule",
    "Timeline",
    "cost",
    "ir",
    "megatron",
    "passes",
    "plan",
    "runtime",
    "schedules",
    "search",
    "sim",
    "timeline",
    "train",
    "verify",
    "view",
]

_HOMES = {
    "Costs": "fullbore.cost",
    "Pipeline": "fullbore.runtime",
    "PostValidatedOptimizer": "fullbore.runtime",
    "Schedule": "fullbore.ir",
    "Timeline": "fullbore.timeline",
}


def __getattr__(name: str) -> object:
    """Import a public name from where it lives (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in __all__:
        return import_module(f"fullbore.{name}")
    raise AttributeError(f"module 'fullbore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
