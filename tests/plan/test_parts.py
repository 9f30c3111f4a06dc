"""What a plan says of its winner adds up, and is what simulator and memory curves say."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from planning import ask

from fullbore.cost.hardware import Capture, Overlap, Roofline
from fullbore.cost.model import Precision, Recompute, Split
from fullbore.cost.model.layer import pieces
from fullbore.cost.model.totals import parameters
from fullbore.plan import Evaluator, plan
from fullbore.plan.findings import findings_of
from fullbore.plan.parts import parts_of
from fullbore.plan.prices import Row, layout_of
from fullbore.plan.space import choices, spreads
from fullbore.sim import memory_curves, simulate
from fullbore.timeline import summarize

GIB = 2**30
FIXED = {
    "plain": {"pipeline": (4,), "schedules": ("1f1b",)},
    "split": {"pipeline": (4,), "schedules": ("zb-h1",)},
    "chunks": {"pipeline": (2,), "tensor": (2,), "schedules": ("interleaved",)},
    "tied": {"pipeline": (4,), "schedules": ("zb-v",), "config": {"tie_word_embeddings": True}},
    "alone": {"pipeline": (1,)},
}


@pytest.fixture(params=FIXED, scope="module")
def found(request):
    return request.param


@pytest.fixture(scope="module")
def findings(found):
    return findings_of(plan(ask(**FIXED[found]), top=3))


def test_the_parts_of_a_step_add_up_to_it(findings):
    assert sum(asdict(findings.parts).values()) == pytest.approx(findings.winner.step_s)
    positive = {k: v for k, v in asdict(findings.parts).items() if k != "imbalance_s"}
    assert min(positive.values()) >= -1e-12


MIXTURE = {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 1024,
}
AGAIN = (
    Recompute(),
    Recompute(granularity="selective"),
    Recompute(granularity="selective", modules=("layernorm", "moe")),
    Recompute(granularity="full"),
    Recompute(granularity="full", layers=2),
)


def test_every_second_of_random_choices_is_in_one_part():
    """What is made again is told with its messages and its waits, and these nowhere else."""
    random, shared = Random(20), 0
    for _ in range(24):
        evaluator, choice = _drawn(random)
        parts, step = parts_of(evaluator, choice), evaluator.step(choice)
        assert sum(asdict(parts).values()) == pytest.approx(step.total_s, rel=1e-9, abs=0)
        told = [parts.compute_s, parts.exposed_s, parts.host_s, parts.recompute_s]
        assert told == pytest.approx(_seconds(evaluator, choice), rel=1e-9, abs=1e-15)
        shared += parts.exposed_s > 0 and parts.recompute_s > 0
    assert shared > 3


def _drawn(random):
    """An evaluator and a choice of its, with layers."""
    mixed, tensor = random.random() < 0.5, random.choice((1, 2))
    question = ask(
        cluster=random.choice(("h100:1x8", "h100:4x2", "b200:1x8")),
        config=MIXTURE if mixed else {"tie_word_embeddings": random.random() < 0.5},
        tensor=(tensor,),
        expert=(random.choice((1, 2)) if mixed else 1,),
        expert_tensor=1 if mixed else None,
        precision=Precision.named(random.choice(("bf16", "fp8"))),
        overlap=Overlap(forward=random.random() < 0.5, expert=random.random() < 0.5),
        capture=Capture(implementation=random.choice(("none", "full_iteration"))),
        overlap_gradients=random.random() < 0.5,
        recompute=(random.choice(AGAIN[:2] + AGAIN[3:] if not mixed else AGAIN),),
        pipeline=(random.choice((1, 2, 4)),),
    )
    evaluator = Evaluator(question)
    choice = random.choice(list(choices(question, random.choice(spreads(question)))))
    again = replace(choice, recompute=question.fixed.recompute[0])
    return evaluator, evaluator.with_layers(again)


def _seconds(evaluator, choice):
    """Of the average rank: products, attention and traffic; messages; waits; all of what is made
    again. Piece by piece, apart from what the planner sums."""
    question, spread, again = evaluator.question, choice.spread, choice.recompute
    roofline = Roofline(
        layout=layout_of(question, spread),
        precision=question.precision,
        kernels=question.kernels,
        overlap=question.overlap,
        capture=question.capture,
    )
    plain, made = (
        pieces(
            question.shape,
            spread.split,
            sequence=question.sequence,
            microbatch=spread.microbatch_size,
            recompute=what,
            precision=question.precision,
            causal=True,
            kernels=question.kernels,
        )
        for what in (Recompute(), replace(again, layers=None))
    )
    first = {
        at
        for start, end in pairwise(np.cumsum([1, *choice.layers]).tolist())
        for at in range(start, min(end, start + (again.layers or end)))
    }
    total = np.zeros(4)
    for at, pair in enumerate(zip(plain, made, strict=True)):
        priced = roofline.priced(pair[again.layers is None or at in first])
        for one in (priced.forward, priced.input_grad, priced.weight_grad):
            computed = one.products_s + one.attention_s + one.traffic_s
            total += computed, one.exposed_s, one.waited_s, 0.0
        total[3] += priced.recompute.total_s
    return total * spread.microbatches / spread.pipeline


def test_what_waiting_for_the_slow_costs_is_a_share_of_the_pipeline(findings):
    step = findings.plan.evaluator.step(findings.winner.choice)
    share = findings.plan.question.cluster.constants.step_share
    assert findings.parts.lost_s == step.lost_s == step.pipeline_s * share


def test_gradients_that_nothing_hides_take_a_ring():
    question = ask(cluster="h100:2x8", pipeline=(1,), tensor=(1,), overlap_gradients=False)
    evaluator = Evaluator(question)
    (choice,) = (one for one in choices(question, spreads(question)[0]) if one.schedule == "1f1b")
    sharded = replace(choice, spread=replace(choice.spread, distributed=True))
    whole = replace(choice, spread=replace(choice.spread, distributed=False))
    loads = [evaluator.load(evaluator.with_layers(one)) for one in (whole, sharded)]
    parameters = loads[0].gradients[0] / question.precision.gradient
    device, constants = question.cluster.device, question.cluster.constants
    per_s = min(
        device.node_bytes_per_s * constants.node_share,
        8 * device.network_bytes_per_s * constants.network_share,
    )
    ring_s = 4 * parameters * 15 / 16 / per_s
    assert loads[0].reduction_s[0] == pytest.approx(2 * ring_s, rel=0.02)
    assert loads[1].reduction_s[0] == pytest.approx(1.5 * ring_s, rel=0.02)


@pytest.mark.parametrize("cluster", ["h100:1x4", "h100:4x1"])
def test_a_tied_head_far_from_its_embedding_adds_up_gradients(cluster):
    """Two ranks exchange the whole gradient of the matrix, after the pipeline and all replicas."""
    fixed = {"pipeline": (4,), "schedules": ("1f1b",), "microbatch_size": (1,), "cluster": cluster}
    steps = []
    for tied in (False, True):
        evaluator, choice = _only(config={"tie_word_embeddings": tied}, **fixed)
        steps.append(evaluator.step(choice))
        assert evaluator.bound_s(choice) <= steps[-1].total_s
    device, constants = (getattr(evaluator.question.cluster, n) for n in ("device", "constants"))
    per_s, start_s = device.node_bytes_per_s * constants.node_share, constants.collective_s
    if cluster == "h100:4x1":
        per_s = device.network_bytes_per_s * constants.network_share
        start_s += constants.network_step_s
    exchanged_s = 32000 * 1024 * 4 / per_s + 2 * start_s
    plain, tied = steps
    assert tied.pipeline_s == pytest.approx(plain.pipeline_s)
    assert tied.reduction_s - plain.reduction_s == pytest.approx(exchanged_s)
    # One rank holds both ends of a V.
    folded, choice = _only(
        config={"tie_word_embeddings": True}, **{**fixed, "schedules": ("zb-v",)}
    )
    assert folded.load(choice).tied_s == 0.0


def _only(**asked):
    evaluator = Evaluator(ask(**asked))
    (spread,) = spreads(evaluator.question)
    (choice,) = choices(evaluator.question, spread)
    return evaluator, evaluator.with_layers(choice)


def test_idle_time_adds_up_on_every_rank(findings):
    idle = findings.idle
    step = findings.plan.evaluator.step(findings.winner.choice)
    total = idle.busy_s + idle.warmup_s + idle.steady_s + idle.cooldown_s
    total = total + idle.imbalance_s + idle.communication_s
    assert total == pytest.approx(np.full(len(total), step.pipeline_s))


def test_memory_adds_up_on_every_rank(findings):
    memory = findings.memory
    parts = memory.parameters + memory.gradients + memory.optimizer + memory.activations
    parts = parts + memory.logits + memory.buffers + memory.allowance
    assert parts == pytest.approx(memory.total)
    assert memory.total.max() == findings.winner.peak_bytes
    last = findings.plan.evaluator.programs.outline(findings.winner.choice).home[-1]
    assert memory.logits[last] > 0
    assert np.delete(memory.logits, last).max(initial=0.0) == 0


def test_the_simulator_and_its_curves_say_the_same(findings):
    evaluator, choice = findings.plan.evaluator, findings.winner.choice
    schedule, costs = evaluator.programs.of(choice).schedule, evaluator.costs(choice)
    timeline = simulate(schedule, costs)
    assert timeline.makespan_s == pytest.approx(evaluator.step(choice).pipeline_s, rel=1e-12)
    summary = summarize(timeline, schedule)
    assert np.array(summary.busy_s) == pytest.approx(evaluator.load(choice).busy_s)
    curves = memory_curves(timeline, schedule, costs)
    scratch = evaluator.load(choice).sums[Row.SCRATCH].max()
    held = findings.memory.activations + findings.memory.logits
    for curve, bytes_ in zip(curves, held, strict=True):
        assert curve.peak - 1 <= bytes_ <= curve.peak + scratch + 1


def test_all_parameters_are_somewhere(findings):
    """Over all ranks, with a tied head twice where its ends are on different ranks."""
    evaluator, choice = findings.plan.evaluator, findings.winner.choice
    question, spread = evaluator.question, choice.spread
    whole = pieces(
        question.shape,
        Split(),
        sequence=question.sequence,
        microbatch=1,
        recompute=choice.recompute,
        precision=question.precision,
        causal=True,
    )
    held = findings.memory.parameters.sum() / question.precision.weight * spread.tensor
    assert held == pytest.approx(parameters(whole), rel=1e-3)  # norms are not cut


def test_every_neighbour_has_a_reason(findings):
    for one in findings.neighbours:
        assert one.reason
        if one.slower is not None:
            assert one.slower >= -1e-9 or "other flags were asked for" in one.reason
    changes = [one.change for one in findings.neighbours]
    assert len(set(changes)) == len(changes)


def test_reasons_name_what_stands_in_the_way():
    made = plan(ask(cluster="h100:2x4", memory_limit_bytes=5 * GIB, sequence=4096))
    reasons = {one.change: one.reason for one in findings_of(made).neighbours}
    assert any("GiB of 5 GiB" in reason for reason in reasons.values())
    wide = plan(ask(cluster="h100:2x4", tensor=(4,)))
    reasons = {one.change: one.reason for one in findings_of(wide).neighbours}
    assert reasons["TP=8"].endswith("more than the 4 devices of a node: use 4 or less")
    assert "% slower" in " ".join(reasons.values())


def test_utilization_follows_from_flops(findings):
    first = findings.figures[0]
    device = findings.plan.question.cluster.device
    seconds = findings.winner.step_s * findings.plan.question.cluster.size
    assert first.mfu == pytest.approx(first.model_flops / seconds / device.peak_flop_per_s("bf16"))
    assert first.hfu >= first.mfu


def test_what_is_counted_changes_utilization_and_not_time():
    few = {"pipeline": (4,), "schedules": ("1f1b",), "microbatch_size": (1,)}
    full = Recompute(granularity="full")
    part, whole = (plan(ask(causal=causal, **few, recompute=(full,))) for causal in (True, False))
    some, all_ = (findings_of(made).figures[0] for made in (part, whole))
    assert all_.model_flops > some.model_flops and all_.mfu > some.mfu
    assert whole.winner.step_s == part.winner.step_s
    assert some.hfu / some.mfu == pytest.approx(4 / 3, rel=0.05)  # the head is not made again


def test_layers_by_hand_are_no_faster():
    made = plan(ask(pipeline=(4,), schedules=("1f1b",)))
    layers = list(made.winner.choice.layers)
    for source in range(4):
        for target in range(4):
            moved = list(layers)
            moved[source] -= 1
            moved[target] += 1
            if min(moved[:-1]) >= 1 and moved[-1] >= 0:
                other = replace(made.winner.choice, layers=tuple(moved))
                one = made.evaluator.evaluate(other)
                assert not one.fits or one.step_s >= made.winner.step_s * (1 - 1e-9)
