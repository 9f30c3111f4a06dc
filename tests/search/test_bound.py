"""No bound exceeds what is possible: against programs made without it, and against OR-tools."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import cases

from fullbore.cost import Costs
from fullbore.errors import ConfigError, CostsError, ScheduleError
from fullbore.search import Job, MemoryLimit, bound, exact, search
from fullbore.search.arm import Arm
from fullbore.search.bound import lower_bound, reach_of
from fullbore.search.candidates import candidates, evaluated
from fullbore.search.exact import prove
from fullbore.search.improve import seed_kernels

# The first search on a machine compiles its kernels, which takes long where others want the cores.
pytestmark = pytest.mark.timeout(400)


def arms(job: Job) -> list[Arm]:
    """All placements, searched for a while by programs that do not know of any bound."""
    seed_kernels(0)
    random, made = np.random.default_rng(0), [Arm(one, spans=job.spans) for one in candidates(job)]
    for arm in made:
        arm.bound_s = -1.0
        arm.explore(random)
        for start in arm.starts(2):
            now = start.tokens.copy()
            for step in arm.steps():
                arm.cool(start, now, step, 600)
    return [arm for arm in made if arm.best is not None]


@settings(max_examples=20)
@given(cases())
def test_no_program_is_below_its_bound(case):
    try:
        searched = arms(case.job)
    except ConfigError:
        return
    for arm in searched:
        assert lower_bound(arm.instance, spans=case.job.spans) <= arm.best_s * (1 + 1e-12)


@settings(max_examples=10)
@given(cases())
def test_a_bound_that_looks_at_few_microbatches_is_one_and_says_no_more(case):
    with pytest.MonkeyPatch.context() as patch:
        for one in candidates(case.job):
            whole_s = lower_bound(one.instance, spans=case.job.spans)
            patch.setattr(bound, "_STEPS", 1)
            patch.setattr(bound, "_LOOKED", 2)
            part_s = lower_bound(one.instance, spans=case.job.spans)
            assert 0 <= part_s <= whole_s * (1 + 1e-12)


@st.composite
def tiny_jobs(draw: st.DrawFn) -> Job:
    """Up to 24 actions, with little, or more than before, held between I and W."""
    ranks, microbatches, chunks = draw(
        st.sampled_from([(1, 4, 2), (2, 3, 1), (2, 2, 2), (3, 2, 1), (2, 4, 1)])
    )
    held = draw(st.sampled_from([1, 2, 8]))
    quarters = st.integers(0, 6).map(lambda n: n / 4)
    stages = [
        {
            "forward_s": draw(quarters),
            "backward_s": draw(quarters),
            "input_grad_s": draw(quarters),
            "weight_grad_s": draw(quarters),
            "activation_bytes": 4,
            "input_grad_held_bytes": held,
        }
        for _ in range(ranks * chunks)
    ]
    costs = Costs.parse(
        {
            "stages": stages,
            "hop_s": draw(st.sampled_from([0, 0.25])),
            "message_bytes": draw(st.integers(0, 2)),
            "bandwidth_bytes_per_s": 8,
            "overhead_s": draw(st.sampled_from([0, 0.25])),
        }
    )
    limit = f"{draw(st.integers(2, 8 * chunks))}B"
    return Job(
        costs=costs,
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=(chunks,),
        memory_limit=MemoryLimit.parse(limit),
        spans=draw(st.booleans()),
    )


@settings(max_examples=12)
@given(tiny_jobs())
def test_no_bound_is_above_what_the_solver_finds(job):
    pytest.importorskip("ortools")
    for arm in arms(job):
        told = {"below_s": arm.best_s, "time_s": 5, "spans": job.spans}
        proof, best_s = prove(arm.instance, **told), arm.best_s
        if proof.tokens is not None:
            solved_s = evaluated(arm.instance, proof.tokens, spans=job.spans)
            best_s = min(best_s, solved_s) if solved_s is not None else best_s
        bound_s = lower_bound(arm.instance, spans=job.spans)
        assert bound_s <= best_s * (1 + 1e-12)
        helped = prove(arm.instance, **told, bound_s=bound_s, reach=reach_of(arm.instance))
        assert helped.bound_s <= best_s * (1 + 1e-5)
        assert helped.tokens is not None or not helped.is_final  # there is what the search found


def test_a_bound_is_raised_step_by_step_where_time_is_short(monkeypatch):
    pytest.importorskip("ortools")
    (arm,) = arms(job_of([STAGE] * 2, "1x", virtual_stages=(1,)))
    solve, tried = exact._Model.solve, []

    def hopeless_at_first(self: exact._Model, time_s: float, stop: object) -> exact.Proof:
        tried.append(self._below_s)
        whole = len(tried) > 2
        return solve(self, 20.0, stop) if whole else exact.Proof(bound_s=0.0, is_final=False)

    monkeypatch.setattr(exact._Model, "solve", hopeless_at_first)
    best_s = arm.best_s
    proof = prove(arm.instance, below_s=best_s, time_s=100, spans=False, bound_s=best_s / 2)
    # All at once, then half way, in vain; what is below that is refuted step by step.
    assert tried[:3] == [best_s, 0.75 * best_s, 0.625 * best_s]
    assert tried[3:] == sorted(tried[3:])
    assert 0.7499 * best_s < proof.bound_s <= 0.75 * best_s + 1  # all is whole seconds here
    assert proof.tokens is None


def test_a_proof_ends_when_it_is_told_to():
    """Else it would go on for hours, and this test would run out of time."""
    pytest.importorskip("ortools")
    job = job_of([STAGE | {"input_grad_held_bytes": 4}] * 8, "0.4x", ranks=4, microbatches=8)
    arm = next(arm for arm in arms(job) if arm.instance.stages == 8)
    asked = iter([False, False])
    told = {"below_s": arm.best_s, "time_s": 1e5, "spans": False}
    proof = prove(arm.instance, **told, stop=lambda: next(asked, True))
    assert not proof.is_final


def test_a_span_may_be_shorter_than_the_step_is_long():
    """Two ranks of which the second begins, and ends, a forward later: neither ever idles."""
    pytest.importorskip("ortools")
    job = job_of([STAGE] * 2, "3x", virtual_stages=(1,), microbatches=3, spans=True)
    (one,) = candidates(job)
    proof = prove(one.instance, below_s=9.0, time_s=20, spans=True)
    assert proof.tokens is not None
    assert evaluated(one.instance, proof.tokens, spans=True) == 9.0
    assert evaluated(one.instance, proof.tokens, spans=False) == 10.0


def job_of(stages: list[dict[str, float]], limit: str, **more: object) -> Job:
    given = {"ranks": len(stages), "microbatches": 6, "virtual_stages": None, "spans": False}
    costs = Costs.parse({"stages": stages, "overhead_s": more.pop("overhead_s", 0)})
    return Job(costs=costs, memory_limit=MemoryLimit.parse(limit), **{**given, **more})


STAGE = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0, "activation_bytes": 8}


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [
        (job_of([STAGE] * 3, "1x", ranks=2), ConfigError, "cannot share evenly"),
        (job_of([STAGE] * 2, "1x", virtual_stages=(0,)), ConfigError, "nearest legal value is 1"),
        (job_of([STAGE] * 4, "1x", ranks=2, virtual_stages=(3,)), ConfigError, "cannot be told"),
        (job_of([STAGE] * 2, "1x", microbatches=0), ScheduleError, "nearest legal value is 1"),
        (job_of([STAGE] * 2, "7B"), ConfigError, "too tight for one microbatch"),
        (job_of([STAGE] * 2, "1x", means=("offload",)), CostsError, "nothing says how long"),
        (job_of([{"forward_s": 1.0, "backward_s": 1.0}] * 2, "9B"), CostsError, "activation_bytes"),
        (job_of([STAGE] * 2, "1x", microbatches=2000), ConfigError, "proofs are for"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_compiled(
    job, error, words, monkeypatch
):
    monkeypatch.setattr(
        sys.modules[search.__module__], "_compile", lambda **_: pytest.fail("compiled")
    )
    with pytest.raises(error, match=words):
        search(job, prove_s=1.0 if job.microbatches == 2000 else None)
