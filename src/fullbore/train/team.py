"""The ranks of a run acting as one: what fails on one of them fails on all, with the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullbore import errors
from fullbore.errors import FullboreError, RankError
from fullbore.runtime import lost_rank

__all__ = ["Team"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """All ranks of a run, or one alone (group None). local_rank: this rank's place on its machine.

    group: for small messages between hosts, of gloo. Where a rank is lost while the others talk
    here, they raise RankError naming it, and cannot talk again. patient: the same for where one
    rank has work that may take long, and the others wait; None: group. mesh: with the dimensions
    "pp" and "dp", where there are several replicas; without it rank is the rank of the one
    pipeline.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    group: dist.ProcessGroup | None = None
    patient: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    @property
    def pipeline_rank(self) -> int:
        """This rank within its pipeline."""
        return self.rank if self.mesh is None else self.mesh.get_local_rank("pp")

    @property
    def replica(self) -> int:
        """Which replica of the pipeline this rank belongs to."""
        return 0 if self.mesh is None else self.mesh.get_local_rank("dp")

    @property
    def replicas(self) -> int:
        """D."""
        return 1 if self.mesh is None else self.mesh["dp"].size()

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def together(self, work: Callable[[], T], *, wrong: type[FullboreError]) -> T:
        """Do something on every rank; if it fails on any, the same error is raised on every one.

        An error that is not ours becomes one of class `wrong`.
        """
        result: list[T] = []
        problem: tuple[str, str] | None = None
        try:
            result.append(work())
        except RankError:
            raise  # every rank has it
        except FullboreError as error:
            problem = (type(error).__name__, str(error))
        except Exception as error:
            problem = (wrong.__name__, f"{type(error).__name__}: {error}")
        found = next((said for said in self.gather(problem) if said is not None), None)
        if found is not None:
            raise getattr(errors, found[0], wrong)(found[1])
        return result[0]

    def leaders_first(self, work: Callable[[], T], *, wrong: type[FullboreError]) -> T:
        """The same, but one rank of each machine before the others, who find its work done."""
        team = self if self.patient is None else replace(self, group=self.patient)
        if self.local_rank == 0:
            done = team.together(work, wrong=wrong)
            team.together(lambda: None, wrong=wrong)
            return done
        team.together(lambda: None, wrong=wrong)
        return team.together(work, wrong=wrong)

    def gather(self, value: T) -> Sequence[T]:
        """Every rank's value, in the order of ranks, on every rank."""
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.size
        with self._noticing():
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def any(self, flag: bool) -> bool:  # noqa: FBT001 - one value, and the name says it
        """Whether the flag is up on any rank."""
        if self.group is None:
            return flag
        flags = torch.tensor(int(flag))
        with self._noticing():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flags)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Find out which rank is lost if a connection breaks inside."""
        try:
            yield
        except RuntimeError as error:
            assert self.group is not None
            raise lost_rank(self.group, error) from error
