"""From options to values: which schedule is meant, and what its actions cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fullbore.errors import ConfigError, ScheduleError

if TYPE_CHECKING:
    from fullbore.cost import Costs
    from fullbore.ir import Schedule

__all__ = ["CostsSource", "Shape", "read_costs", "read_schedule"]


_BACKWARD_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """P, M, v, G, k and what leaves for the host, as typed; None where they were not."""

    ranks: int | None
    microbatches: int | None
    virtual_stages: int | None
    group_size: int | None
    slices: int | None = None
    offload: int | None = None
    offload_ahead: int | None = None

    def placed(self, schedule: Schedule) -> Schedule:
        """A schedule with the copies that are asked for. Raises ScheduleError or ConfigError."""
        if self.offload is None:
            if self.offload_ahead is not None:
                raise ConfigError("--offload-ahead says when what --offload sends away comes back")
            return schedule
        from fullbore.passes import offload

        ahead = 1 if self.offload_ahead is None else self.offload_ahead
        return offload(schedule, away=self.offload, ahead=ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsSource:
    """Where the costs come from: a file, or what was typed (a stage, a microbatch)."""

    file: Path | None
    forward_s: float | None
    backward_s: float | None
    input_grad_s: float | None
    weight_grad_s: float | None
    hop_s: float | None
    offload_s: float | None = None

    def typed(self) -> dict[str, float]:
        """The seconds that were typed, by the names that `Costs.uniform` gives them."""
        seconds = {
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "input_grad_s": self.input_grad_s,
            "weight_grad_s": self.weight_grad_s,
            "hop_s": self.hop_s,
            "offload_s": self.offload_s,
        }
        return {name: value for name, value in seconds.items() if value is not None}


def read_schedule(name: str, shape: Shape) -> Schedule:
    """The schedule of that name, or else the one in that CSV file, which must obey every law.

    With the copies to the host that the shape asks for. Raises ScheduleError, NotationError,
    VerificationError or ConfigError.
    """
    from fullbore.schedules import FAMILIES, build

    known = [family.name for family in FAMILIES]
    if name not in known:
        if name.lower().endswith(".csv") or Path(name).is_file():
            return shape.placed(_read_file(name, shape))
        raise ScheduleError(
            f"no schedule or CSV file is called {name!r}: choose one of {', '.join(known)}"
        )
    if shape.ranks is None or shape.microbatches is None:
        raise ConfigError(f"{name} needs -p (pipeline ranks) and -m (microbatches)")
    built = build(
        name,
        ranks=shape.ranks,
        microbatches=shape.microbatches,
        virtual_stages=shape.virtual_stages,
        microbatch_group_size=shape.group_size,
        slices=shape.slices,
    )
    return shape.placed(built)


def _read_file(name: str, shape: Shape) -> Schedule:
    from fullbore.ir import Schedule
    from fullbore.verify import check

    schedule = Schedule.from_csv(name)
    _refuse_contradictions(schedule, shape, name)
    check(schedule)
    return schedule


def _refuse_contradictions(schedule: Schedule, shape: Shape, file: str) -> None:
    """A file says P, M and v itself; flags may repeat them, never change them."""
    for flag, typed, true in (
        ("-p", shape.ranks, schedule.ranks),
        ("-m", shape.microbatches, schedule.microbatches // schedule.slices),
        ("-v", shape.virtual_stages, schedule.virtual_stages),
        ("-g", shape.group_size, None),
        ("--slices", shape.slices, schedule.slices if schedule.slices > 1 else None),
    ):
        if typed is not None and typed != true:
            remedy = "leave it out" if true is None else f"write {true}, or leave it out"
            raise ConfigError(f"{flag} {typed} does not fit {file}: {remedy}")


def read_costs(source: CostsSource, *, stages: int, splits_backward: bool = False) -> Costs:
    """The costs of `stages` stages, from a costs file or from flags.

    splits_backward: whether halves of the backward are needed; where only the whole one was typed,
    or nothing, each takes half of it. Raises CostsError, and ConfigError where two of them say
    the same.
    """
    from fullbore.cost import Costs

    typed = source.typed()
    if "backward_s" in typed and not typed.keys().isdisjoint({"input_grad_s", "weight_grad_s"}):
        raise ConfigError(
            "--backward-s is the sum of --input-grad-s and --weight-grad-s: give it, or both halves"
        )
    if source.file is None:
        if splits_backward and typed.keys().isdisjoint({"input_grad_s", "weight_grad_s"}):
            whole_s = typed.get("backward_s", _BACKWARD_S)
            typed |= {"input_grad_s": whole_s / 2, "weight_grad_s": whole_s / 2}
        return Costs.uniform(stages=stages, **typed)
    if typed:
        flags = ", ".join("--" + name.replace("_", "-") for name in typed)
        raise ConfigError(f"--costs {source.file} already says the costs: leave {flags} out")
    return Costs.load(source.file)
