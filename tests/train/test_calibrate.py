"""What several machines measure: the ranks of each sum by themselves, as rings within nodes do."""

from __future__ import annotations

from calibrate_jobs import summed
from ranks import run_ranks


def test_ranks_of_a_machine_sum_by_themselves() -> None:
    assert run_ranks(summed, 3, ["one", "other", "one"]) == [2.0, 1.0, 2.0]
