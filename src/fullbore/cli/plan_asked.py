"""What was typed for `fullbore plan`, before anything of it is looked at."""

from __future__ import annotations

from dataclasses import dataclass

from fullbore.plan.engines import Engine

__all__ = ["ANY", "Asked"]

ANY = "any"  # typed where a script says a value that shall not hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed; None where it was not. Numbers of which several may be are text."""

    model: str | None
    cluster: str | None
    global_batch: int | None
    sequence: int | None
    memory_limit: str | None
    pipeline: str | None
    tensor: str | None
    context: str | None
    expert: str | None
    expert_tensor: int | None
    microbatch_size: str | None
    virtual_stages: str | None
    group: str | None
    schedule: str | None
    layers: str | None
    recompute: str | None
    recompute_layers: int | None
    recompute_modules: str | None
    sequence_parallel: bool | None
    distributed: bool | None
    precision: str | None
    flash: bool | None
    causal: bool
    overlap_messages: bool | None
    overlap_gradients: bool | None
    overlap_parameters: bool | None
    overlap_tensor: bool | None
    overlap_experts: bool | None
    dispatcher: str | None
    graphs: str | None
    graph_modules: str | None
    engines: tuple[Engine, ...]
