"""What an action costs in seconds and bytes: the one JSON format of costs throughout Fullbore.

Profiles write it, the simulator, search and plan read it; so a measured run can be predicted again
and a prediction can be edited by hand.

    {"stages": [{"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0,
                 "activation_bytes": 4e6, "input_grad_held_bytes": 1e6}, ... one per stage],
     "hop_s": 1e-5, "message_bytes": 65536, "bandwidth_bytes_per_s": 5e10, "overhead_s": 0,
     "offload_bytes_per_s": 2e10}

A stage names `backward_s`, or `input_grad_s` and `weight_grad_s`, or all three where a full
backward was measured apart from its halves. Everything but `stages` and their times is optional.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fullbore.errors import CostsError
from fullbore.files import replace_file

__all__ = ["Costs", "StageCosts"]

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class StageCosts(BaseModel):
    """Seconds and bytes of one stage and one microbatch.

    forward_s, backward_s: T_F and T_B, seconds. input_grad_s, weight_grad_s: T_I and T_W, both or
    neither; backward_s is their sum where it is not given.
    activation_bytes: held from the start of the forward. input_grad_held_bytes: held instead
    between I and W of a split backward, inputs and output gradients of products; that may be more.
    recompute_s: a recomputation that the schedule places (R); as forward_s where it is not given.
    recompute_input_bytes: given for a stage that recomputes, held instead of activation_bytes until
    it does, which is at its R, or without one when its backward starts.
    offload_bytes: what of activation_bytes leaves for the host at an OFFLOAD; all if not given.
    offload_s, reload_s: of the two copies; the second as the first, and the first as offload_bytes
    and the file's offload_bytes_per_s say, where they are not given.
    """

    model_config = _STRICT

    forward_s: float = Field(ge=0)
    backward_s: float = Field(ge=0)
    input_grad_s: float | None = Field(default=None, ge=0)
    weight_grad_s: float | None = Field(default=None, ge=0)
    activation_bytes: float | None = Field(default=None, ge=0)
    input_grad_held_bytes: float | None = Field(default=None, ge=0)
    recompute_s: float | None = Field(default=None, ge=0)
    recompute_input_bytes: float | None = Field(default=None, ge=0)
    offload_bytes: float | None = Field(default=None, ge=0)
    offload_s: float | None = Field(default=None, ge=0)
    reload_s: float | None = Field(default=None, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _sum_halves(cls, data: Any) -> Any:
        """Fill in T_B = T_I + T_W where only the halves are given."""
        if not isinstance(data, Mapping) or data.get("backward_s") is not None:
            return data
        halves = data.get("input_grad_s"), data.get("weight_grad_s")
        if all(isinstance(half, int | float) for half in halves):
            return {**data, "backward_s": sum(halves)}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.input_grad_s is None) != (self.weight_grad_s is None):
            raise ValueError("give input_grad_s and weight_grad_s together, or neither")
        if self.input_grad_held_bytes is not None and self.activation_bytes is None:
            raise ValueError("input_grad_held_bytes takes the place of activation_bytes: give both")
        if self.recompute_input_bytes is not None and self.activation_bytes is None:
            raise ValueError("recompute_input_bytes takes the place of activation_bytes: give both")
        self._check_offload()
        return self

    def _check_offload(self) -> None:
        if self.offload_bytes is not None:
            if self.activation_bytes is None:
                raise ValueError("offload_bytes is a part of activation_bytes: give both")
            if self.offload_bytes > self.activation_bytes:
                raise ValueError("more offload_bytes than activation_bytes: no more can leave")
        if self.reload_s is not None and self.offload_s is None:
            raise ValueError("give offload_s with reload_s")

    @property
    def recomputation_s(self) -> float:
        """Seconds of an R."""
        return self.forward_s if self.recompute_s is None else self.recompute_s

    @property
    def leaving_bytes(self) -> float | None:
        """What an OFFLOAD moves; None where nothing says it."""
        return self.activation_bytes if self.offload_bytes is None else self.offload_bytes

    @property
    def is_split(self) -> bool:
        """Whether the halves of the backward have times of their own."""
        return self.input_grad_s is not None


class Costs(BaseModel):
    """What every action of a schedule costs.

    stages: one StageCosts a stage of the model. hop_s: latency of one message, seconds.
    message_bytes, bandwidth_bytes_per_s: a message occupies its link for the quotient, and no time
    where no bandwidth is given. overhead_s: host time before every compute action, counted as idle.
    offload_bytes_per_s: of the one channel between a rank and its host, which both copies take.
    """

    model_config = _STRICT

    stages: tuple[StageCosts, ...] = Field(min_length=1, strict=False)
    hop_s: float = Field(default=0.0, ge=0)
    message_bytes: float = Field(default=0.0, ge=0)
    bandwidth_bytes_per_s: float | None = Field(default=None, gt=0)
    overhead_s: float = Field(default=0.0, ge=0)
    offload_bytes_per_s: float | None = Field(default=None, gt=0)

    @property
    def occupancy_s(self) -> float:
        """How long one message keeps its link busy: message_bytes / bandwidth_bytes_per_s."""
        if self.bandwidth_bytes_per_s is None:
            return 0.0
        return self.message_bytes / self.bandwidth_bytes_per_s

    def offload_s(self, stage: int) -> float | None:
        """How long an OFFLOAD of a stage takes; None where nothing says it."""
        of_stage = self.stages[stage]
        if of_stage.offload_s is not None:
            return of_stage.offload_s
        if self.offload_bytes_per_s is None or of_stage.leaving_bytes is None:
            return None
        return of_stage.leaving_bytes / self.offload_bytes_per_s

    def reload_s(self, stage: int) -> float | None:
        """How long a RELOAD of a stage takes; None where nothing says it."""
        given = self.stages[stage].reload_s
        return self.offload_s(stage) if given is None else given

    @classmethod
    def parse(cls, data: object, *, where: str = "costs") -> Self:
        """Check a mapping as read from JSON; CostsError names each unknown or missing key."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise CostsError(_explain(error, where)) from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read a costs file; CostsError where it cannot be read or is not one."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:  # ValueError: no text, or no JSON
            raise CostsError(f"cannot read costs from {path}: {error}") from error
        return cls.parse(data, where=str(path))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the costs file; CostsError where that is not possible."""
        try:
            text = self.model_dump_json(indent=2, exclude_none=True) + "\n"
            replace_file(path, text.encode())
        except OSError as error:
            raise CostsError(f"cannot write costs to {path}: {error}") from error

    @classmethod
    def uniform(
        cls,
        *,
        stages: int,
        forward_s: float = 1.0,
        backward_s: float | None = None,
        input_grad_s: float | None = None,
        weight_grad_s: float | None = None,
        activation_bytes: float | None = None,
        input_grad_held_bytes: float | None = None,
        offload_s: float | None = None,
        hop_s: float = 0.0,
        message_bytes: float = 0.0,
        bandwidth_bytes_per_s: float | None = None,
        overhead_s: float = 0.0,
        offload_bytes_per_s: float | None = None,
    ) -> Self:
        """The same costs for each of `stages` stages.

        backward_s is 2 where neither it nor its halves are given. Raises CostsError, which names
        the key once and not for each stage, for negative or missing values.
        """
        if backward_s is None and input_grad_s is None and weight_grad_s is None:
            backward_s = 2.0
        stage = {
            "forward_s": forward_s,
            "backward_s": backward_s,
            "input_grad_s": input_grad_s,
            "weight_grad_s": weight_grad_s,
            "activation_bytes": activation_bytes,
            "input_grad_held_bytes": input_grad_held_bytes,
            "offload_s": offload_s,
        }
        shared = {
            "hop_s": hop_s,
            "message_bytes": message_bytes,
            "bandwidth_bytes_per_s": bandwidth_bytes_per_s,
            "overhead_s": overhead_s,
            "offload_bytes_per_s": offload_bytes_per_s,
        }
        given = {key: value for key, value in stage.items() if value is not None}
        one = cls.parse({"stages": [given], **shared})
        return cls.parse({"stages": one.stages * stages, **shared})


def _explain(error: ValidationError, where: str) -> str:
    """Pydantic's findings as lines of ours: which key, what is wrong, which keys exist.

    Where stages are wrong, Pydantic adds that too few are left; that is nobody's mistake.
    """
    findings = error.errors()
    inside = any(found["loc"][:1] == ("stages",) and len(found["loc"]) > 1 for found in findings)
    return "\n".join(
        f"{where}: {_key(found['loc'])}{_finding(found['type'], found['msg'], found['loc'])}"
        for found in findings
        if not (inside and found["type"] == "too_short")
    )


def _key(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return f"{path.lstrip('.')}: " if path else ""


def _finding(kind: str, message: str, location: tuple[int | str, ...]) -> str:
    in_stage = location[:1] == ("stages",) and len(location) > 1
    known = ", ".join((StageCosts if in_stage else Costs).model_fields)
    if kind == "extra_forbidden":
        return f"unknown key; known are {known}"
    if kind == "missing" and location[-1] == "backward_s":
        return "missing key; give backward_s, or input_grad_s and weight_grad_s"
    if kind == "missing":
        return f"missing key; known are {known}"
    return message.removeprefix("Value error, ")
