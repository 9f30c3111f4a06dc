"""The 64-GPU job: formulas hold where they should, memory limits are kept, factors multiply."""

from __future__ import annotations

from math import prod

import pytest

from fullbore.plan.job64 import job_of

GIB = 2**30


@pytest.fixture(scope="module")
def job():
    """At M = 64, one replica of eight tensor-parallel ranks."""
    return job_of(tensor=8)


def row(job, name):
    return next(one for one in job.rows if one.name.startswith(name))


def test_bubbles_are_those_of_the_formulas(job):
    assert row(job, "GPipe, all M").bubble == pytest.approx(7 / 71)
    assert row(job, "1F1B").bubble == pytest.approx(7 / 71)
    assert row(job, "interleaved").bubble == pytest.approx(7 / 135)
    assert row(job, "GPipe, rounds of 16").bubble > 7 / 71
    assert all(one.idle > one.bubble for one in job.rows)


def test_memory_is_as_schedules_promise(job):
    gpipe, once = row(job, "GPipe, all M"), row(job, "1F1B")
    twice = row(job, "interleaved")
    assert not gpipe.fits and row(job, "GPipe, rounds of 16").fits
    assert gpipe.activation_bytes > 6 * once.activation_bytes
    assert twice.activation_bytes / once.activation_bytes == pytest.approx(23 / 16, rel=0.02)
    for one in job.rows:
        assert one.fits == (one.total_bytes <= 80 * GIB)


def test_the_best_beats_the_bar_of_the_claims_at_one_m(job):
    assert job.bar is not None and job.bar.fits
    assert job.bar.bubble < 0.064
    assert job.bar.activation_bytes < 0.418 * job.rows[0].activation_bytes
    assert job.rows[-1].step_s == min(one.step_s for one in job.rows if one.fits)


def test_factors_multiply_to_the_speedup(job):
    assert prod(one.speedup for one in job.factors) == pytest.approx(job.speedup)
    assert 1 < job.speedup < 2.25
