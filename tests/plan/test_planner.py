"""A plan fits, nothing that was looked at is faster, and nothing that matters was left out."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from planning import ask

from fullbore.cost.model import Recompute
from fullbore.errors import ConfigError, ScheduleError
from fullbore.plan import Choice, Evaluator, plan
from fullbore.plan.engines import engine_of
from fullbore.plan.planner import SLOWEST
from fullbore.plan.space import choices, is_asked, recomputes, spreads

GIB = 2**30


@pytest.fixture
def seen(monkeypatch):
    """Every choice that is simulated, with the seconds of its step."""
    steps = []
    step = Evaluator.step

    def noted(self, choice):
        made = step(self, choice)
        steps.append((choice, made.total_s))
        return made

    monkeypatch.setattr(Evaluator, "step", noted)
    return steps


def test_no_plan_is_over_memory_and_none_that_was_simulated_is_faster(seen):
    for limit in (80 * GIB, 8 * GIB, 5.5 * GIB):
        seen.clear()
        question = ask(memory_limit_bytes=limit)
        made = plan(question, top=5)
        evaluator = made.evaluator
        for one in (*made.best, *made.front):
            assert one.fits and one.peak_bytes <= limit
            assert float(evaluator.memory(one.choice).total.max()) == one.peak_bytes
        for choice, step_s in list(seen):
            fits = float(evaluator.held(choice).max()) <= limit
            assert not fits or step_s >= made.winner.step_s
        assert [one.step_s for one in made.best] == sorted(one.step_s for one in made.best)


def test_what_is_pruned_is_in_neither_list():
    question = ask(global_batch=8, microbatch_size=(1, 2))
    made = plan(question, top=3)
    assert made.counts.pruned > 0
    evaluator = Evaluator(question)
    every = [
        evaluator.evaluate(replace(choice, recompute=recompute))
        for spread in spreads(question)
        for choice in choices(question, spread)
        for recompute in recomputes(question)
    ]
    fitting = [one for one in every if one.fits]
    shown = {}
    for one in fitting:
        key = one.choice.spread, one.choice.schedule
        shown[key] = min(one.step_s, shown.get(key, float("inf")))
    for found, expected in zip(made.best, sorted(shown.values()), strict=False):
        assert found.step_s <= expected
    for one in fitting:
        if one.step_s <= SLOWEST * made.winner.step_s:
            assert any(
                other.step_s <= one.step_s and other.peak_bytes <= one.peak_bytes
                for other in made.front
            )


def test_a_bound_is_below_every_simulation():
    question = ask(global_batch=12, microbatch_size=(1,), cluster="h100:2x4")
    evaluator = Evaluator(question)
    for spread in spreads(question):
        for choice in choices(question, spread):
            made = evaluator.with_layers(choice)
            assert evaluator.bound_s(made) <= evaluator.step(made).total_s


def test_the_same_question_has_the_same_answer():
    first, again = (plan(ask(memory_limit_bytes=8 * GIB)) for _ in range(2))
    assert first.best == again.best and first.front == again.front
    assert first.counts == again.counts


def test_counts_are_of_what_there_is(seen):
    """Nothing is hopeless where all fits and everything is listed: each candidate is simulated."""
    some = {"schedules": ("1f1b", "zb-v", "interleaved"), "virtual_stages": (1, 2, 3)}
    question = ask(global_batch=8, microbatch_size=(1, 2), **some)
    made = plan(question, top=10**6)
    evaluator, exist = Evaluator(question), 0
    for spread in spreads(question):
        for choice in choices(question, spread):
            for recompute in recomputes(question):
                with suppress(ConfigError, ScheduleError):
                    evaluator.held(evaluator.with_layers(replace(choice, recompute=recompute)))
                    exist += 1
    counts = made.counts
    assert counts.spreads == len(spreads(question)) and not counts.spreads_pruned
    assert (counts.candidates, counts.simulated) == (exist, exist)
    assert counts.simulations == len(seen) > exist
    few = plan(ask(memory_limit_bytes=6 * GIB, **some), top=1).counts
    assert few.spreads_pruned and few.too_large and few.pruned and few.simulated


def test_fixed_flags_are_kept():
    fixed = {
        "pipeline": (4,),
        "tensor": (1,),
        "microbatch_size": (2,),
        "virtual_stages": (1, 3),
        "schedules": ("1f1b", "interleaved"),
        "recompute": (Recompute(granularity="full"),),
        "distributed": False,
    }
    question = ask(**fixed)
    made = plan(question)
    for one in (*made.best, *made.front):
        assert is_asked(question, one.choice)
    assert {one.choice.schedule for one in made.best} == {"1f1b", "interleaved"}
    told = plan(ask(pipeline=(2,), layers=(7, 5), schedules=("1f1b",)))
    assert {one.choice.layers for one in told.best} == {(7, 5)}


def test_given_layers_may_leave_both_ends_to_embedding_and_head():
    question = ask(pipeline=(2,), tensor=(1,), schedules=("interleaved",), microbatch_size=(1,))
    evaluator, spread = Evaluator(question), spreads(question)[0]
    choice = Choice(spread=spread, schedule="interleaved", virtual_stages=7, group=2)
    with pytest.raises(ConfigError, match="14 stages, and the model has 12 layers"):
        evaluator.evaluate(choice)
    one = evaluator.evaluate(replace(choice, layers=(0, *[1] * 12, 0)))
    assert one.step_s >= evaluator.bound_s(one.choice) > 0


def test_the_front_is_a_staircase():
    made = plan(ask())
    assert made.front[-1].step_s == made.winner.step_s
    for small, large in pairwise(made.front):
        assert small.peak_bytes < large.peak_bytes and small.step_s > large.step_s


def test_as_few_layers_are_recomputed_as_it_takes():
    common = {"pipeline": (2,), "tensor": (1,), "schedules": ("1f1b",), "microbatch_size": (4,)}
    free = plan(ask(**common, sequence=4096))
    limit = free.winner.peak_bytes * 0.7
    made = plan(ask(**common, sequence=4096, memory_limit_bytes=limit))
    again = made.winner.choice.recompute
    assert again.granularity == "full" and again.layers is not None
    fewer = replace(again, layers=again.layers - 1)
    one = made.evaluator.evaluate(
        replace(made.winner.choice, recompute=fewer if fewer.layers else Recompute())
    )
    assert not one.fits


def test_a_stop_keeps_the_best_so_far():
    asked = iter(range(10**6))
    made = plan(ask(), stop=lambda: next(asked) > 40)
    assert not made.complete and made.best and made.winner.fits
    with pytest.raises(ConfigError, match="stopped before any plan"):
        plan(ask(), stop=lambda: True)


def test_progress_is_told():
    told = []
    made = plan(ask(), report=told.append)
    assert [p.done for p in told] == list(range(told[0].spreads + 1))
    assert told[-1].best_s is not None and told[-1].best_s >= made.winner.step_s


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"memory_limit_bytes": 1 * GIB}, "no plan fits 1 GiB"),
        ({"pipeline": (3,)}, "does not divide the 4 devices .* use P = 2 or 4"),
        ({"pipeline": (16,)}, "more than the model's 12 layers"),
        ({"global_batch": 3, "pipeline": (1,), "tensor": (1,)}, "--global-batch-size 3 .* use 4"),
        ({"tensor": (3,)}, "--tensor-model-parallel-size 3 .* 4 devices of .*: use T = 2 or 4"),
        ({"context": (3,)}, "--context-parallel-size 3 .* 4 devices of .*: use C = 2 or 4"),
        ({"pipeline": (4,), "layers": (5, 7)}, "--stage-layers has 2 stages, and P=4"),
        ({"global_batch": 10**12}, "is .* microbatches of .*: use at most"),
        ({"tensor": (8,), "cluster": "h100:2x4"}, "more than the 4 devices of a node"),
        ({"expert": (2,)}, "has no experts"),
        ({"memory_limit_bytes": 99 * GIB}, "has 80 GiB; give that or less"),
        ({"global_batch": 0}, "--global-batch-size 0"),
        ({"virtual_stages": (9,), "schedules": ("interleaved",)}, "no schedule of these numbers"),
    ],
)
def test_what_cannot_be_is_refused_by_name(more, said):
    with pytest.raises(ConfigError, match=said):
        plan(ask(**more))


def test_where_nothing_fits_the_expert_parallelism_with_which_something_would_is_named():
    mixture = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    asked = {"config": mixture, "pipeline": (1,), "tensor": (1,)}
    for limit, size in ((9, 2), (7, 4)):
        with pytest.raises(ConfigError, match=rf"give --expert-model-parallel-size {size}, with"):
            plan(ask(**asked, memory_limit_bytes=limit * GIB))
        assert plan(ask(**asked, expert=(size,), memory_limit_bytes=limit * GIB)).winner.fits
    with pytest.raises(ConfigError, match="on rank 0: use more devices"):
        plan(ask(**asked, memory_limit_bytes=3 * GIB))


def test_where_nothing_fits_a_long_sequence_may_be_cut():
    asked = {"pipeline": (1,), "tensor": (1,), "sequence": 65536, "global_batch": 4}
    with pytest.raises(ConfigError, match=r"give --context-parallel-size (\d+), with") as refused:
        plan(ask(**asked, memory_limit_bytes=12 * GIB))
    size = int(str(refused.value).partition("--context-parallel-size ")[2].partition(",")[0])
    assert plan(ask(**asked, context=(size,), memory_limit_bytes=12 * GIB)).winner.fits


def test_where_nothing_fits_more_nodes_may_do():
    few = {"schedules": ("1f1b",), "microbatch_size": (1,)}
    limit = {"memory_limit_bytes": 2.5 * GIB, **few}
    with pytest.raises(ConfigError, match=r"give it 2 nodes of 4, with which P=2 TP=4 needs 2\.4"):
        plan(ask(cluster="h100:1x4", **limit))
    assert plan(ask(cluster="h100:2x4", **limit)).winner.fits


def test_norms_are_made_again_where_that_is_all_it_takes():
    common = {"pipeline": (2,), "tensor": (1,), "schedules": ("1f1b",), "microbatch_size": (4,)}
    common["layers"] = (6, 6)
    free = plan(ask(**common, sequence=4096))
    norms = Recompute().changed("selective", modules=("layernorm",))
    less = free.evaluator.evaluate(replace(free.winner.choice, recompute=norms))
    assert less.peak_bytes < free.winner.peak_bytes and less.step_s > free.winner.step_s
    made = plan(ask(**common, sequence=4096, memory_limit_bytes=less.peak_bytes))
    assert made.winner.choice.recompute == norms
    layers = replace(made.winner.choice, recompute=Recompute(granularity="full", layers=1))
    other = made.evaluator.evaluate(layers)
    assert not other.fits or other.step_s > made.winner.step_s
    engines = {"engines": (engine_of("fullbore"),)}  # which makes whole layers again only
    told = plan(ask(**common, **engines, sequence=4096, memory_limit_bytes=less.peak_bytes))
    assert told.winner.choice.recompute.granularity != "selective"
