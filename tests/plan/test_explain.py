"""Megatron's flags explained: every rule with its nearest legal values, choices, and advice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fullbore.cli.explain_document import document
from fullbore.cli.explain_tables import report
from fullbore.cost.hardware import Cluster
from fullbore.cost.model import Recompute
from fullbore.cost.model.script import flags_of
from fullbore.errors import ConfigError
from fullbore.plan.emit import layout
from fullbore.plan.explain import Job, explain
from fullbore.plan.explain.advice import Desk
from fullbore.plan.explain.asked import choice_of, precision_of, question_of
from fullbore.plan.explain.edit import setting, without
from fullbore.plan.explain.moves import moves
from fullbore.plan.explain.nearest import judged, mended
from fullbore.plan.explain.notes import notes_of
from fullbore.plan.explain.stage_layout import layers_of_layout

SMALL = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --group-query-attention "
    "--num-query-groups 4 --ffn-hidden-size 2816 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--vocab-size 32000 --seq-length 1024 --max-position-embeddings 1024 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 1 --global-batch-size 16 --bf16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer"
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-grouped-gemm "
    "--expert-tensor-parallel-size 1"
)


def job(*changes, base=SMALL, cluster="h100:1x8"):
    """The small job with flags given anew; `no --flag` leaves one out."""
    flags = flags_of(base)
    for change in changes:
        if change.startswith("no --"):
            del flags[change[5:].replace("-", "_")]
        else:
            flags |= flags_of(change)
    return Job(flags=flags, cluster=Cluster.parse(cluster))


def wrong(*changes, **more):
    """Messages of a job, each with the changes that would mend it."""
    return {
        one.broken.message: [edit.text for edit in one.nearest]
        for one in judged(job(*changes, **more))
    }


def test_legal_flags_are_legal():
    assert wrong() == {}
    assert wrong(EXPERTS) == {}
    assert wrong("--num-layers-per-virtual-pipeline-stage 3") == {}
    assert (
        wrong("--recompute-granularity full --recompute-method block --recompute-num-layers 2")
        == {}
    )
    assert wrong("--pipeline-model-parallel-layout 'Ett|ttt|ttt|ttttL'") == {}


P = "--pipeline-model-parallel-size"
T = "--tensor-model-parallel-size"


@pytest.mark.parametrize(
    ("changes", "said", "legal"),
    [
        ([f"{T} 3"], f"{T} 3 does not divide the 16 attention heads", [f"{T} 2", f"{T} 4"]),
        ([f"{P} 3"], f"{T} 2 x {P} 3 = 6 does not divide the 8 devices", [f"{P} 2", f"{P} 4"]),
        (
            ["--num-attention-heads 12 --kv-channels 64", f"{T} 8", f"{P} 1"],
            f"{T} 8 does not divide the 12 attention heads",
            [f"{T} 4"],
        ),
        (["--seq-length 1023"], "is not divided by 2", ["--seq-length 1022"]),
        (
            ["--seq-length 2048"],
            "--max-position-embeddings 1024 is less than --seq-length 2048",
            ["--max-position-embeddings 2048", "--seq-length 1024"],
        ),
        (
            ["--global-batch-size 15"],
            "--global-batch-size 15 is no multiple of",
            ["--global-batch-size 14", "--global-batch-size 16"],
        ),
        (
            ["--micro-batch-size 3"],
            "--global-batch-size 16 is no multiple of",
            ["--micro-batch-size 2", "--micro-batch-size 4"],
        ),
        (
            ["--num-layers-per-virtual-pipeline-stage 4"],
            "does not divide the 6 layers of a rank",
            [
                "--num-layers-per-virtual-pipeline-stage 3",
                "--num-layers-per-virtual-pipeline-stage 6",
            ],
        ),
        (
            ["--num-virtual-stages-per-pipeline-rank 4"],
            "--num-virtual-stages-per-pipeline-rank 4 does not divide the 6 layers",
            [
                "--num-virtual-stages-per-pipeline-rank 3",
                "--num-virtual-stages-per-pipeline-rank 6",
            ],
        ),
        (
            [
                "--num-layers-per-virtual-pipeline-stage 3",
                "--num-virtual-stages-per-pipeline-rank 2",
            ],
            "say the same twice",
            ["no --num-layers-per-virtual-pipeline-stage"],
        ),
        (
            [
                "--num-virtual-stages-per-pipeline-rank 3",
                f"{P} 4",
                "--global-batch-size 6",
                f"{T} 1",
            ],
            "leave a last group of",
            ["--global-batch-size 8"],
        ),
        (
            [
                "--num-virtual-stages-per-pipeline-rank 3",
                "--microbatch-group-size-per-virtual-pipeline-stage 16",
            ],
            "(G) is 16 and M is 8",
            ["--microbatch-group-size-per-virtual-pipeline-stage 8"],
        ),
        (
            ["--decoder-first-pipeline-num-layers 5 --num-virtual-stages-per-pipeline-rank 2"],
            "--decoder-first-pipeline-num-layers 5 does not divide over v=2",
            ["--decoder-first-pipeline-num-layers 4", "--decoder-first-pipeline-num-layers 6"],
        ),
        (
            ["--decoder-first-pipeline-num-layers 5 --account-for-loss-in-pipeline-split"],
            "say the same twice",
            ["no --account-for-loss-in-pipeline-split"],
        ),
        (
            ["--account-for-embedding-in-pipeline-split"],
            "13 layers do not divide over P=2",
            [
                f"{P} 1",
                "no --account-for-embedding-in-pipeline-split",
                "--account-for-loss-in-pipeline-split",
            ],
        ),
        (
            ["--pipeline-model-parallel-layout 'Ettt|ttttL'"],
            "has 7 layers (t), and --num-layers is 12",
            ["no --pipeline-model-parallel-layout"],
        ),
        (
            ["--recompute-granularity full"],
            "full needs --recompute-method uniform or block",
            [],
        ),
        (
            ["--recompute-activations --recompute-method uniform"],
            "--recompute-activations with --recompute-method",
            ["no --recompute-activations", "no --recompute-method"],
        ),
        (
            ["--recompute-granularity selective --recompute-modules core_attn moe_act"],
            "--recompute-modules moe_act needs --moe-grouped-gemm",
            ["no --recompute-modules", "--moe-grouped-gemm"],
        ),
        (
            ["--overlap-param-gather"],
            "--overlap-param-gather needs --overlap-grad-reduce",
            ["no --overlap-param-gather", "--overlap-grad-reduce"],
        ),
        (
            ["--tp-comm-overlap", "no --sequence-parallel"],
            "--tp-comm-overlap needs --sequence-parallel",
            ["no --tp-comm-overlap", "--sequence-parallel"],
        ),
        (
            ["--overlap-p2p-communication-warmup-flush"],
            "needs interleaving",
            ["no --overlap-p2p-communication-warmup-flush"],
        ),
        (
            ["--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication"],
            f"takes {P} 3 or more",
            ["--num-virtual-stages-per-pipeline-rank 1", "no --no-overlap-p2p-communication"],
        ),
        (["--fp16"], "--fp16 and --bf16 exclude each other", ["no --fp16", "no --bf16"]),
        (
            ["--train-iters 5 --rampup-batch-size 4 4 100"],
            "--rampup-batch-size and --train-iters exclude each other",
            ["no --train-iters", "no --rampup-batch-size"],
        ),
        (["no --micro-batch-size"], "--micro-batch-size is missing", ["--micro-batch-size 1"]),
        (["--batch-size 2"], "--batch-size is no longer there", ["no --batch-size"]),
        (["--bf16 true"], "--bf16 true: it is a switch", ["--bf16"]),
        (
            ["--normalization rmsnorm"],
            "it must be LayerNorm or RMSNorm",
            ["--normalization RMSNorm"],
        ),
        (["--num-layers twelve"], "--num-layers twelve: it must be a whole number", []),
        ([EXPERTS, "--expert-model-parallel-size 3"], "does not divide the 8 experts", []),
        (
            [EXPERTS, "no --sequence-parallel"],
            "needs --sequence-parallel",
            ["--sequence-parallel"],
        ),
        (
            [EXPERTS, "--expert-model-parallel-size 8"],
            "--expert-model-parallel-size 8 x --expert-tensor-parallel-size 1",
            ["--expert-model-parallel-size 4", f"{P} 1"],
        ),
        (
            ["--fp8-format hybrid --fp8-param-gather", "no --use-distributed-optimizer"],
            "--fp8-param-gather needs --use-distributed-optimizer or",
            ["no --fp8-param-gather", "--use-distributed-optimizer"],
        ),
        (
            ["--cpu-offloading-num-layers 4 --recompute-activations"],
            f"--cpu-offloading-num-layers with {P} 2",
            ["no --cpu-offloading-num-layers", f"{P} 1"],
        ),
        (
            ["--distribute-saved-activations"],
            "--distribute-saved-activations needs --recompute-granularity full",
            ["no --distribute-saved-activations"],
        ),
        (
            ["--use-torch-fsdp2", f"{P} 1", f"{T} 1"],
            "--use-torch-fsdp2 and --use-distributed-optimizer exclude each other",
            ["no --use-torch-fsdp2", "no --use-distributed-optimizer"],
        ),
        (
            [EXPERTS, "--overlap-moe-expert-parallel-comm"],
            "--overlap-moe-expert-parallel-comm needs --moe-token-dispatcher-type alltoall or flex",
            ["--moe-token-dispatcher-type alltoall", "no --overlap-moe-expert-parallel-comm"],
        ),
        (
            [
                EXPERTS,
                "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall",
            ],
            f"--overlap-moe-expert-parallel-comm with {P} 2 needs",
            [
                "--num-virtual-stages-per-pipeline-rank 2",
                "no --overlap-moe-expert-parallel-comm",
                f"{P} 1",
            ],
        ),
        (
            [EXPERTS, "--cuda-graph-impl local"],
            "--cuda-graph-impl with the module moe needs --moe-expert-capacity-factor and",
            ["--cuda-graph-impl none", "no --cuda-graph-impl"],
        ),
        (
            ["--cuda-graph-impl local", "--cuda-graph-modules attn dense"],
            "--cuda-graph-modules dense: it must be some of attn, mlp, moe_router",
            ["no --cuda-graph-modules"],
        ),
        (
            ["--expert-model-parallel-size 2"],
            "has no experts",
            ["--expert-model-parallel-size 1", "no --expert-model-parallel-size"],
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_what_megatron_refuses_is_told_with_the_nearest_legal_values(changes, said, legal):
    found = wrong(*changes)
    message = next((message for message in found if said in message), None)
    assert message is not None, found
    assert [text for text in legal if text not in found[message]] == [], found[message]


def test_a_missing_vocabulary_hides_nothing_else():
    found = wrong("no --vocab-size", "no --max-position-embeddings", "--num-attention-heads 17")
    for said in ("--vocab-size is", "--num-attention-heads 17", "--max-position-embeddings is"):
        assert any(said in message for message in found), found
    (legal,) = (made for message, made in found.items() if "--vocab-size is" in message)
    assert legal == ["--vocab-size 50257"]


def test_a_device_without_the_precision_is_a_violation():
    found = wrong("--fp8-format hybrid", cluster="a100:1x8")
    (message,) = found
    assert message.startswith("--fp8-format: NVIDIA A100") and "has no fp8 peak" in message
    assert found[message] == ["no --fp8-format"]


def test_what_has_no_price_here_is_not_said_to_be_refused_by_megatron():
    bare = job("no --bf16")
    made = explain(bare.flags, Cluster.parse("h100:1x8"))
    assert made.violations == () and not made.runs
    (one,) = made.unpriced
    assert one.broken.message.startswith("neither --bf16 nor --fp16: NVIDIA H100")
    assert "may give fp32_tflop_per_s" in one.broken.message
    assert [edit.text for edit in one.nearest] == ["--bf16", "--fp16"]
    assert made.mend.text == "--bf16" and made.findings.winner.step_s > 0
    told = report(made)
    assert told.splitlines()[2] == "legal: Megatron-LM refuses none of these flags"
    assert "not priced here: neither --bf16" in told and "figures below are with --bf16" in told
    assert document(made)["legal"] and document(made)["not_priced"][0]["rule"] == "peak"
    device = bare.cluster.device.model_copy(update={"fp32_tflop_per_s": 60.0})
    assert judged(replace(bare, cluster=replace(bare.cluster, device=device))) == ()


def test_a_stage_without_layers_has_nothing():
    flags = ("--pipeline-model-parallel-layout 'Ettttttt|ttttt||L'", f"{T} 1")
    one = explain(job(*flags).flags, Cluster.parse("h100:1x8"))
    load = one.findings.plan.evaluator.load(one.findings.winner.choice)
    assert load.sums.seconds[:, 2].tolist() == [0, 0, 0, 0] and load.sums.seconds[0, 3] > 0


def test_all_violations_are_told_at_once():
    found = wrong(
        f"{T} 3",
        f"{P} 4",
        "--global-batch-size 15",
        "--num-layers-per-virtual-pipeline-stage 2",
        "--recompute-granularity full",
        "--overlap-param-gather",
        "--fp16",
    )
    assert len(found) >= 8, list(found)


def test_nearest_values_agree_with_every_other_rule():
    # 4 divides the heads; with P = 3 only the cluster of 12 has room for it.
    found = wrong(f"{T} 3", f"{P} 3", cluster="h100:1x6")
    for message, legal in found.items():
        assert f"{T} 2" in legal, message
        assert f"{T} 4" not in legal, message


def test_mended_flags_are_legal():
    broken = job(f"{T} 3", "--global-batch-size 15", "--recompute-granularity full", "--fp16")
    edit = mended(broken)
    assert edit is not None and judged(broken.changed(edit)) == ()
    assert mended(job()) is not None and mended(job()).changes == ()
    assert mended(job("no --num-layers")) is None


def test_changes_read_as_they_are_typed():
    edit = setting("micro_batch_size", 2) + without("bf16") + setting("swiglu")
    assert edit.text == "--micro-batch-size 2, no --bf16, --swiglu"
    assert edit.applied({"bf16": (), "lr": ("1",)}) == {
        "micro_batch_size": ("2",),
        "swiglu": (),
        "lr": ("1",),
    }
    assert (edit + setting("bf16")).text.endswith("--bf16, --swiglu")


@pytest.mark.parametrize("layers", [(3, 3, 3, 3), (2, 3, 3, 4), (1, 4, 4, 3, 0, 0)])
def test_a_layout_is_read_as_it_is_written(layers):
    assert layers_of_layout(layout(layers), layers=sum(layers), ranks=2) == layers
    told = layout(layers, 1)
    assert layers_of_layout(told, layers=sum(layers), ranks=2, further=1) == layers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Ett|tx|L", "x is no sign of it"),
        ("Ett|t|L", "has 3 stages"),
        ("tt|ttL", "begin with its only E"),
        ("Ett|ttL", "has 4 layers"),
        ("Ett|tmL", "--mtp-num-layers is 0"),
        ("E(t|)*999999999L", "more than"),
    ],
)
def test_a_layout_that_is_none_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        layers_of_layout(text, layers=3, ranks=2)


def test_flags_choose_what_megatron_would_run():
    plain = choice_of(job())
    assert (plain.schedule, plain.virtual_stages, plain.group) == ("1f1b", 1, None)
    assert (plain.spread.data, plain.spread.microbatches, plain.layers) == (2, 8, (6, 6))
    assert not question_of(job()).overlap_messages
    chunks = "--num-layers-per-virtual-pipeline-stage 2"
    looped = choice_of(job(chunks))
    assert (looped.schedule, looped.virtual_stages, looped.group) == ("interleaved", 3, 2)
    assert question_of(job(chunks)).overlap_messages
    both = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    assert choice_of(job(both, f"{P} 2")).layers == (6, 6)
    one = choice_of(job("--decoder-first-pipeline-num-layers 5"))
    assert one.layers == (5, 7)
    assert choice_of(job("--pipeline-model-parallel-layout 'Ett|t*3|t*3|ttttL'")).layers == (
        2,
        3,
        3,
        4,
    )
    block = job("--recompute-granularity full --recompute-method block --recompute-num-layers 2")
    assert choice_of(block).recompute.layers == 2


def test_embedding_and_loss_may_stand_alone():
    ends = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    alone = job(ends, f"{P} 2", "--num-virtual-stages-per-pipeline-rank 7")
    assert choice_of(alone).layers == (0, *[1] * 12, 0)
    made = explain(alone.flags, alone.cluster, top=1)
    assert made.runs and made.findings.winner.step_s > 0


def test_the_optimizers_types_count():
    kept = precision_of(job())
    assert (kept.gradient, kept.main_weight, kept.moments) == (4, 4, 8)
    small = precision_of(
        job(
            "--use-precision-aware-optimizer --main-grads-dtype bf16 --main-params-dtype fp16 "
            "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8"
        )
    )
    assert (small.gradient, small.main_weight, small.moments) == (2, 2, 3)
    assert precision_of(job("no --bf16")).name == "fp32"
    assert precision_of(job("--optimizer sgd")).moments == 4
    (told,) = notes_of(job("--optimizer muon")).unpriced
    assert "--optimizer muon: its states and its time are taken to be Adam's" in told


def test_weights_are_gathered_beside_the_forward_where_the_flags_say_so():
    reduced = job("--overlap-grad-reduce", cluster="h100:4x2")
    both = reduced.changed(setting("overlap_param_gather"))
    steps = [Desk(None).evaluate(one).step_s for one in (job(cluster="h100:4x2"), reduced, both)]
    assert steps[0] > steps[1] > steps[2]
    told = [edit.text for edit in moves(reduced)]
    assert "--overlap-param-gather" in told and "--overlap-grad-reduce" not in told
    both = setting("overlap_grad_reduce") + setting("overlap_param_gather")
    assert both in list(moves(job()))


def test_flags_without_effect_are_named():
    notes = notes_of(
        job(
            f"{T} 1",
            "no --group-query-attention",
            "--recompute-method uniform --recompute-num-layers 1",
            "--microbatch-group-size-per-virtual-pipeline-stage 4",
            "--tensor-parallel-size 4 --log-interval 10 --lr 1e-4",
            "--rampup-batch-size 4 4 100 --nnodes 2 --nproc_per_node 8",
        )
    )
    ignored = [text.partition(":")[0] for text in notes.ignored]
    assert ignored == [
        "--sequence-parallel",
        "--num-query-groups",
        "--recompute-method",
        "--recompute-num-layers",
        "--microbatch-group-size-per-virtual-pipeline-stage",
    ]
    assert notes.unknown == (("--tensor-parallel-size", T),)
    assert notes.unread == ("--log-interval", "--lr")
    assert "the script starts 2 x 8 processes" in " ".join(notes.unpriced)


def test_the_best_change_is_the_best_of_all_that_are_told():
    made = explain(job().flags, Cluster.parse("h100:1x8"), top=100)
    assert made.runs and made.advice is not None and made.findings is not None
    steps = [one.evaluated.step_s for one in made.advice.changes]
    assert steps == sorted(steps) and made.advice.best is made.advice.changes[0]
    winner = made.findings.winner
    assert made.advice.best.gain == pytest.approx(1 - steps[0] / winner.step_s)
    for one in made.advice.changes:
        assert not judged(made.job.changed(one.edit)), one.edit.text
        assert one.evaluated.fits
    told = {one.edit.text for one in made.advice.changes}
    assert {"--micro-batch-size 2", f"{T} 1", f"{P} 1", "--overlap-grad-reduce"} <= told
    assert "--num-virtual-stages-per-pipeline-rank 2" in told


def test_modules_that_are_recomputed_have_their_own_price():
    again = "--recompute-granularity selective --recompute-modules"
    changes = ("", *(f"{again} {names}" for names in ("layernorm", "layernorm moe_act", "moe")))
    desk = Desk(None)
    made = [desk.evaluate(job(EXPERTS, *filter(None, [change]))) for change in changes]
    peaks, steps = ([getattr(one, name) for one in made] for name in ("peak_bytes", "step_s"))
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(peaks)
    assert steps == sorted(steps) and len(set(steps)) == len(steps)
    named = job(EXPERTS, f"{again} moe_act layernorm")
    assert notes_of(named).unpriced == notes_of(job(EXPERTS)).unpriced
    told = {edit.text for edit in moves(named)}
    assert "--recompute-modules layernorm moe_act" not in told
    assert {"--recompute-modules moe", "no --recompute-modules"} <= told
    plain = {edit.text for edit in moves(job(EXPERTS))}
    assert "--recompute-granularity selective, --recompute-modules moe" in plain
    assert not any("shared_experts" in text or "mla_up_proj" in text for text in plain)


def test_where_it_does_not_fit_the_cheapest_change_that_makes_it_fit_is_told():
    whole = explain(job().flags, Cluster.parse("h100:1x8"))
    peak = whole.findings.winner.peak_bytes
    tight = explain(job().flags, Cluster.parse("h100:1x8"), memory_limit_bytes=peak * 0.97, top=100)
    assert not tight.runs and not tight.findings.winner.fits
    assert tight.advice.best is not None and tight.advice.best.evaluated.fits
    assert all(one.evaluated.fits for one in tight.advice.changes)
    # Nothing but two changes together leaves so little.
    least = min(one.evaluated.peak_bytes for one in whole_changes(whole))
    pairs = explain(job().flags, Cluster.parse("h100:1x8"), memory_limit_bytes=least * 0.99)
    assert pairs.advice.best is not None
    assert pairs.advice.best.evaluated.peak_bytes < least


def whole_changes(made):
    return explain(made.job.flags, made.job.cluster, top=1000).advice.changes


def test_modules_that_a_model_has_not_are_passed_over():
    again = "--recompute-granularity selective --recompute-modules"
    dense = job(f"{again} moe layernorm")
    assert not judged(dense)
    assert choice_of(dense).recompute.modules == ("layernorm",)
    assert choice_of(job(f"{again} moe")).recompute == Recompute()
    assert "--recompute-modules moe: the model has none" in notes_of(dense).ignored


@pytest.mark.parametrize(
    ("tensor", "able"),
    # One replica is left of TP=2, which torchtitan trains in 32 bits only.
    [(1, ("Fullbore's engine", "torchtitan")), (2, ())],
)
def test_who_could_run_a_schedule_that_megatron_has_not(tensor, able):
    alone = ["no --sequence-parallel"] if tensor == 1 else []
    made = explain(job(f"{T} {tensor}", f"{P} 4", *alone).flags, Cluster.parse("h100:1x8"), top=1)
    assert made.beyond is not None and made.beyond.gain > 0
    assert made.beyond.engines == able
