"""Warm-up counts and peak activations: the published formulas, and Megatron's own order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullbore.ir import Kind, Program, Schedule
from fullbore.schedules import gpipe, interleaved, looped_bfs, one_f_one_b


def forwards_before_the_first_pair(program: Program) -> int:
    """Forwards before the steady phase: those before the first backward, less its own pair's."""
    first_backward = int(np.flatnonzero(program.kind == Kind.B)[0])
    return min(first_backward - 1, len(program) // 2)


def peaks(schedule: Schedule) -> list[float]:
    """Peak activations of each rank, in microbatches x 1/P of the model."""
    unit = schedule.ranks / schedule.stages
    return [
        float(np.cumsum(np.where(program.kind == Kind.F, 1, -1)).max() * unit)
        for program in schedule.programs
    ]


def test_warm_up_of_the_worked_example() -> None:
    schedule = interleaved(ranks=4, microbatches=8, virtual_stages=2, microbatch_group_size=4)
    assert [forwards_before_the_first_pair(p) for p in schedule.programs] == [10, 8, 6, 4]


@given(ranks=st.integers(1, 8), virtual=st.integers(1, 4), rounds=st.integers(1, 4), data=st.data())
def test_interleaved_warm_up_is_the_formula(ranks: int, virtual: int, rounds: int, data) -> None:
    group = data.draw(st.integers(ranks, 2 * ranks))
    microbatches = rounds * group
    schedule = interleaved(
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=virtual,
        microbatch_group_size=group,
    )
    for rank, program in enumerate(schedule.programs):
        formula = min(2 * (ranks - 1 - rank) + (virtual - 1) * group, microbatches * virtual)
        steady = formula < microbatches * virtual
        expected = formula if steady else microbatches * virtual - 1
        assert forwards_before_the_first_pair(program) == expected


@given(ranks=st.integers(1, 12), microbatches=st.integers(1, 24))
def test_1f1b_warm_up_and_peak_are_the_formulas(ranks: int, microbatches: int) -> None:
    schedule = one_f_one_b(ranks=ranks, microbatches=microbatches)
    for rank, program in enumerate(schedule.programs):
        warmup = min(ranks - 1 - rank, microbatches)
        assert forwards_before_the_first_pair(program) == min(warmup, microbatches - 1)
    assert peaks(schedule) == [min(ranks - r, microbatches) for r in range(ranks)]


@given(ranks=st.integers(1, 8), virtual=st.integers(1, 4), rounds=st.integers(1, 5))
def test_interleaved_peak_is_the_formula(ranks: int, virtual: int, rounds: int) -> None:
    schedule = interleaved(ranks=ranks, microbatches=rounds * ranks, virtual_stages=virtual)
    assert peaks(schedule) == pytest.approx(
        [
            min(((virtual - 1) * ranks + 2 * (ranks - 1 - r) + 1) / virtual, rounds * ranks)
            for r in range(ranks)
        ]
    )


@given(ranks=st.integers(1, 8), virtual=st.integers(1, 4), microbatches=st.integers(1, 9))
def test_gpipe_and_looped_bfs_hold_everything(ranks: int, virtual: int, microbatches: int) -> None:
    assert peaks(gpipe(ranks=ranks, microbatches=microbatches)) == [microbatches] * ranks
    looped = looped_bfs(ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
    assert peaks(looped) == pytest.approx([microbatches] * ranks)


def megatron_order(ranks: int, microbatches: int, virtual: int, group: int) -> list[list[str]]:
    """Megatron's schedule as its source spells it out: a table of (microbatch, chunk), a warm-up
    count, and forward and backward steps that look themselves up in the table.
    """
    table = []
    for start in range(0, microbatches, group):
        members = range(start, min(start + group, microbatches))
        table += [(microbatch, chunk) for chunk in range(virtual) for microbatch in members]
    rows = []
    for rank in range(ranks):
        warmup = min(2 * (ranks - rank - 1) + (virtual - 1) * group, len(table))

        def step(kind: str, k: int, rank: int = rank) -> str:
            microbatch, chunk = table[k]
            chunk = chunk if kind == "F" else virtual - 1 - chunk
            return f"{chunk * ranks + rank}{kind}{microbatch}"

        row = [step("F", k) for k in range(warmup)]
        for k in range(len(table) - warmup):
            row += [step("F", k + warmup), step("B", k)]
        rows.append(row + [step("B", k) for k in range(len(table) - warmup, len(table))])
    return rows


@settings(max_examples=200)
@given(ranks=st.integers(1, 6), virtual=st.integers(1, 4), data=st.data())
def test_where_megatron_runs_the_order_is_megatrons(ranks: int, virtual: int, data) -> None:
    group = data.draw(st.integers(ranks, 2 * ranks))
    rest = data.draw(st.sampled_from([0, *range(ranks, group)]))
    microbatches = data.draw(st.integers(1, 3)) * group + rest
    schedule = interleaved(
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=virtual,
        microbatch_group_size=group,
    )
    assert [[str(a) for a in p] for p in schedule.programs] == megatron_order(
        ranks, microbatches, virtual, group
    )


@given(ranks=st.integers(1, 6), virtual=st.integers(1, 4), microbatches=st.integers(1, 8))
def test_a_group_larger_than_the_step_counts_as_the_step(
    ranks: int, virtual: int, microbatches: int
) -> None:
    def with_group(group: int) -> Schedule:
        return interleaved(
            ranks=ranks,
            microbatches=microbatches,
            virtual_stages=virtual,
            microbatch_group_size=group,
        )

    assert with_group(10**12) == with_group(max(ranks, microbatches))


@given(ranks=st.integers(1, 6), virtual=st.integers(1, 4), microbatches=st.integers(1, 20))
def test_leaving_microbatches_out_never_costs_memory(
    ranks: int, virtual: int, microbatches: int
) -> None:
    schedule = interleaved(ranks=ranks, microbatches=microbatches, virtual_stages=virtual)
    for rank, peak in enumerate(peaks(schedule)):
        formula = ((virtual - 1) * ranks + 2 * (ranks - 1 - rank) + 1) / virtual
        assert peak <= min(formula, microbatches) + 1e-9
