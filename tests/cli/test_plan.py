"""`fullbore plan`: text, JSON and page of one plan, refusals, and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import fields

import pytest
from priced import CONFIGS

from fullbore.cli.plan_asked import Asked
from fullbore.cli.plan_inputs import make_question
from fullbore.cli.plan_tables import flags
from fullbore.errors import ConfigError
from fullbore.plan import Choice, Spread, planner
from fullbore.plan.engines import check_spread, engine_of
from fullbore.plan.space import spreads

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
FEW = ("-p", "2,4", "--micro-batch-size", 1, "--schedule", "1f1b,zb-v,interleaved", "-v", 2)


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def plan(fullbore, config, *more, cluster="h100:1x4", batch=16):
    return fullbore(
        *("plan", "--model", config, "--cluster", cluster),
        *("--global-batch-size", batch, "--seq-length", 1024, *more),
    )


def test_a_plan_as_json(fullbore, config, tmp_path):
    page = tmp_path / "plan.html"
    ran = plan(fullbore, config, *FEW, "--top", 3, "-o", page, "--json")
    assert ran.status == 0, ran.err
    made = ran.json
    assert (made["model"], made["devices"], made["complete"]) == ("small", 4, True)
    assert 1 <= len(made["plans"]) <= 3
    first = made["plans"][0]
    assert first["pipeline_model_parallel_size"] in (2, 4)
    assert first["step_s"] == min(one["step_s"] for one in made["plans"])
    assert sum(made["step_parts"].values()) == pytest.approx(first["step_s"])
    assert max(made["total_bytes"]) == first["peak_bytes"] <= made["memory_limit_bytes"]
    assert first["tokens_per_s"] == pytest.approx(16 * 1024 / first["step_s"])
    assert 0 < first["mfu"] <= first["hfu"] < 1
    assert sum(first["stage_layers"]) == 12
    assert {"change", "reason", "fits", "step_s", "peak_bytes", "slower"} == set(
        made["neighbours"][0]
    )
    assert all(one["step_s"] >= first["step_s"] for one in made["front"])
    check_page(page.read_text(encoding="utf-8"))


def check_page(html):
    assert "<svg" in html and html.count("<circle") >= 1
    assert "Why not otherwise" in html
    assert not re.search(r"(src|href)=\"(?!data:|#)", html)


def test_a_plan_in_words(fullbore, config):
    said = plan(fullbore, config, *FEW).out
    for part in (
        "small (12 layers, hidden 1024) on h100:1x4",
        "--pipeline-model-parallel-size",
        "the best plans",
        "memory of each rank, GiB",
        "idle time of each rank",
        "where the step goes",
        "why not otherwise",
        "none is better in both",
        "causal half of attention counted",
        "allowance: 2 GiB",
    ):
        assert part in said, part
    assert max(map(len, said.splitlines())) < 180


def test_flags_name_every_size():
    sizes = {"pipeline": 3, "tensor": 4, "context": 5, "expert": 6, "expert_tensor": 7}
    rest = {"data": 8, "microbatch_size": 9, "microbatches": 10}
    spread = Spread(**sizes, **rest, sequence_parallel=True, distributed=True)
    told = flags(Choice(spread=spread, schedule="interleaved", virtual_stages=2, group=6))
    for name, size in sizes.items():
        long = name.replace("_", "-") + ("" if name == "expert_tensor" else "-model")
        long = long.replace("context-model", "context")
        assert f"--{long}-parallel-size {size} " in told
    assert "--micro-batch-size 9 " in told and "virtual-pipeline-stage 6 " in told


def test_what_was_fixed_holds(fullbore, config):
    flags = ("--recompute-granularity", "full", "--recompute-num-layers", 2)
    made = plan(fullbore, config, *FEW, *flags, "--no-use-distributed-optimizer", "--json").json
    assert {one["recompute"] for one in made["plans"]} == {"full, 2 a stage"}
    assert not any(one["use_distributed_optimizer"] for one in made["plans"])
    made = plan(
        fullbore, config, "-p", 2, "--schedule", "1f1b", "--stage-layers", "7,5", "--json"
    ).json
    assert {tuple(one["stage_layers"]) for one in made["plans"]} == {(7, 5)}


# The first search on a machine compiles its kernels.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("more", [(), ("--recompute-granularity", "full", "-p", 4)])
def test_the_printed_flags_give_that_plan(fullbore, config, more):
    (best, *_) = json.loads(plan(fullbore, config, "--json", *more).out)["plans"]
    again = plan(fullbore, config, "--json", *best["flags"].split())
    assert again.status == 0, again.err
    (same,) = json.loads(again.out)["plans"]
    assert same == best


def test_the_schedule_and_its_costs_simulate_to_the_same_pipeline(fullbore, config, tmp_path):
    csv, costs = tmp_path / "best.csv", tmp_path / "costs.json"
    files = ("--output-schedule", csv, "--output-costs", costs)
    few = ("-p", 4, "--micro-batch-size", 2, "-v", 2)
    made = plan(fullbore, config, *few, *files, "--search-iterations", 300, "--json").json
    simulated = fullbore("simulate", csv, "--costs", costs, "--json").json
    parts = made["step_parts"]
    after = parts["reduction_s"] + parts["optimizer_s"] + parts["lost_s"]
    assert simulated["makespan_s"] == pytest.approx(made["plans"][0]["step_s"] - after)


def test_a_plan_for_megatron(fullbore, config, tmp_path):
    folder = tmp_path / "launch"
    few = ("-p", "2,4", "--micro-batch-size", 1, "--emit-folder", folder)
    ran = plan(fullbore, config, *few, "--emit", "slurm,megatron", "--no-causal", "--json")
    assert ran.status == 0, ran.err
    assert {one["schedule"] for one in ran.json["plans"]} <= {"1f1b", "interleaved"}
    script = (folder / "megatron.sh").read_text()
    assert "PLAN_ARGS=(" in script and "--global-batch-size 16" in script
    head = script[: script.index("PLAN_ARGS")]
    assert "fullbore plan --model" in head and "--no-causal" in head and "% MFU" in head
    assert f"wrote {folder}/slurm.sbatch" in ran.err
    assert 'bash "$LAUNCH/megatron.sh"' in (folder / "slurm.sbatch").read_text()
    assert not (folder / "fullbore.sh").exists()
    assert f"--pipeline-model-parallel-size {read(ran, 'pipeline_model_parallel_size')}" in script


def test_a_plan_starts_with_the_model_that_it_was_made_for(fullbore, config, tmp_path):
    (config / "model.safetensors").touch()
    few = ("-p", 2, "--micro-batch-size", 1, "--schedule", "1f1b", "--emit-folder", tmp_path)
    assert plan(fullbore, config / "config.json", *few, "--emit", "fullbore").status == 0
    script = (tmp_path / "fullbore.sh").read_text()
    assert f"MODEL={config};" in script and "--from-scratch" not in script
    ran = plan(fullbore, config, *few, "--emit", "k8s", "--tensor-model-parallel-size", 2)
    assert ran.status == 2
    assert "Fullbore's engine cuts no layer's width; plan with" in ran.err


def read(ran, key):
    return ran.json["plans"][0][key]


def test_a_preset_is_a_job_by_itself(fullbore, config, monkeypatch):
    monkeypatch.setattr("fullbore.cli.plan_job.TENSOR", (8,))
    made = fullbore("plan", "--preset", "64gpu-80layer", "--json").json
    (job,) = made["jobs"]
    assert job["num_microbatches"] == 64 and job["bar"]["bubble_fraction"] < 0.064
    told = fullbore("plan", "--preset", "64gpu-80layer").out
    assert "GPipe, rounds of 16" in told and "claimed elsewhere" in told
    beside = plan(fullbore, config, "--preset", "64gpu-80layer", "-o", "x.html").err
    assert "leave --model and --cluster and" in beside and "and --output out" in beside
    assert "it must be 64gpu-80layer" in fullbore("plan", "--preset", "7gpu").err
    assert "give --cluster and --global-batch-size too" in fullbore("plan", "--model", config).err


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    return file


SCRIPT = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 4096 "
    "--vocab-size 32000 --max-position-embeddings 512 --seq-length 512 --global-batch-size 16 "
    "--micro-batch-size 2 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
    "--num-layers-per-virtual-pipeline-stage 3 --bf16 --grad-reduce-in-bf16 "
    "--recompute-granularity selective --recompute-modules layernorm mlp\n"
)
TAKEN = [
    *("--global-batch-size 16", "--seq-length 512", "--micro-batch-size 2"),
    *("--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"),
    *("--num-virtual-stages-per-pipeline-rank 2", "--recompute-granularity selective"),
    *("--recompute-modules layernorm,mlp", "--precision bf16"),
    *("--no-overlap-grad-reduce", "--no-overlap-param-gather", "--grad-reduce-in-bf16"),
]


def of_script(fullbore, script, *more, cluster="h100:1x8"):
    return fullbore("plan", "--model", script, "--cluster", cluster, *more)


def test_what_a_script_says_besides_the_model_holds(fullbore, script):
    ran = of_script(fullbore, script, "--json")
    assert ran.status == 0, ran.err
    made = ran.json
    assert (made["model"], made["seq_length"], made["global_batch_size"]) == ("train", 512, 16)
    assert made["taken_from_model"] == TAKEN
    for one in made["plans"]:
        assert (one["pipeline_model_parallel_size"], one["tensor_model_parallel_size"]) == (2, 2)
        assert (one["micro_batch_size"], one["virtual_stages"]) == (2, 2)
        assert one["recompute"] == "selective, layernorm and mlp"
    assert made["gradient_bytes"] == made["parameter_bytes"]  # both in 16 bits
    said = of_script(fullbore, script, "--top", 1).out
    assert "arguments of train that hold, since no others were typed: --global-batch" in said


def test_what_a_script_says_of_the_optimizer_is_launched_too(fullbore, script, tmp_path):
    folder = tmp_path / "launch"
    few = ("--schedule", "interleaved", "--emit", "megatron", "--emit-folder", folder)
    assert of_script(fullbore, script, *few, "--top", 1).status == 0
    launched = (folder / "megatron.sh").read_text()
    assert "  --grad-reduce-in-bf16\n" in launched
    assert "  --recompute-modules layernorm mlp\n" in launched


def asked(script, **typed):
    """What `fullbore plan` makes of a script and of what is typed beside it."""
    nothing = dict.fromkeys((field.name for field in fields(Asked)), None)
    own = {"model": str(script), "cluster": "h100:4x2", "causal": True, "engines": ()}
    return make_question(Asked(**{**nothing, **own, **typed}))


def test_what_a_script_says_of_the_optimizer_holds_for_other_engines_or_is_refused(script):
    def refusal(name):
        question = asked(script, tensor="1", virtual_stages="1", recompute="none")
        try:
            check_spread(engine_of(name), question, spreads(question)[0])
        except ConfigError as error:
            return str(error)
        return None

    assert refusal("megatron") is None and refusal("deepspeed") is None
    for name in ("torchtitan", "fullbore"):
        assert refusal(name).startswith("--grad-reduce-in-bf16: ")
        assert refusal(name).endswith("of the script, or plan with --emit megatron")
    script.write_text(f"{SCRIPT} --optimizer sgd")
    assert asked(script).optimizer == "sgd" and asked(script).precision.moments == 4
    assert "--optimizer sgd" in asked(script).borrowed.optimizer
    assert refusal("deepspeed") is None
    assert "--optimizer sgd: torchtitan has adam here" in refusal("torchtitan")


def test_gradients_travel_as_a_script_says(script):
    """Beside the passes only where it says so; a file with nothing but a model leaves it open."""

    def beside(question):
        return question.overlap_gradients, question.overlap_parameters

    assert beside(asked(script)) == (False, False)
    assert beside(asked(script, overlap_gradients=True)) == (True, False)
    script.write_text(f"{SCRIPT} --overlap-grad-reduce --overlap-param-gather")
    assert beside(asked(script)) == (True, True)
    assert beside(asked(script, overlap_parameters=False)) == (True, False)
    script.write_text(re.sub(r"--(micro|global)-batch-size \d+", "", SCRIPT))
    alone = asked(script, global_batch=16)
    assert beside(alone) == (True, True)
    assert not any("overlap" in flag for flag in alone.borrowed.taken)


def test_what_is_typed_goes_before_a_script(fullbore, script):
    flags = ("-p", "any", "--tensor-model-parallel-size", "any", "--micro-batch-size", "1,4")
    flags += ("--schedule", "1f1b")
    made = of_script(fullbore, script, *flags, "--recompute-granularity", "none", "--json").json
    assert made["taken_from_model"] == [*TAKEN[:2], *TAKEN[-4:]]
    best = made["plans"][0]
    assert best["recompute"] == "none" and best["micro_batch_size"] in (1, 4)
    assert "--recompute-granularity none" in best["flags"]
    again = of_script(fullbore, script, *best["flags"].split(), "--json").json
    assert again["plans"] == [best]
    other = ("-p", 4, "--seq-length", 256, "--schedule", "1f1b")
    typed = of_script(fullbore, script, *other, "--json").json
    assert typed["seq_length"] == 256 and TAKEN[5] not in typed["taken_from_model"]


MIXTURE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 "
    "--vocab-size 32000 --seq-length 512 --max-position-embeddings 512 --global-batch-size 16 "
    "--micro-batch-size 1 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type flex "
    "--moe-expert-capacity-factor 1.0 --bf16 --fp8-format e4m3 --fp8-recipe mxfp8 "
    "--external-cuda-graph --cuda-graph-scope attn moe_router\n"
)
OF_KERNELS = [
    *("--precision fp8_mx", "--moe-token-dispatcher-type flex"),
    *("--cuda-graph-impl transformer_engine", "--cuda-graph-modules attn,moe_router"),
    *("--no-overlap-grad-reduce", "--no-overlap-param-gather", "--moe-expert-capacity-factor"),
]


def test_what_a_script_says_of_kernels_holds_unless_typed(fullbore, script, tmp_path):
    script.write_text(MIXTURE)
    few = ("--schedule", "1f1b", "--recompute-granularity", "none", "--top", 1)
    made = of_script(fullbore, script, *few, "--json", cluster="b200:1x4").json
    assert made["precision"] == "fp8_mx"
    assert made["taken_from_model"][-7:] == OF_KERNELS
    launch = ("--emit", "megatron", "--emit-folder", tmp_path / "launch")
    whole = of_script(
        *(fullbore, script, *few, *launch, "--cuda-graph-impl", "full_iteration"),
        *("--moe-token-dispatcher-type", "alltoall", "--bf16", "--json"),
        cluster="b200:1x4",
    ).json
    assert whole["taken_from_model"][-3:] == OF_KERNELS[-3:]
    assert not set(OF_KERNELS[:-3]) & set(whole["taken_from_model"])
    assert (whole["precision"], whole["step_parts"]["host_s"]) == ("bf16", 0.0)
    assert made["step_parts"]["host_s"] > 0.0
    launched = (tmp_path / "launch" / "megatron.sh").read_text()
    plan_args = launched[launched.index("PLAN_ARGS") :]
    assert "--cuda-graph-impl full_iteration" in plan_args
    assert "--moe-token-dispatcher-type alltoall" in plan_args


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ("--cuda-graph-impl some", (), "--cuda-graph-impl some: it must be none, local"),
        ("", ("--moe-token-dispatcher-type", "deepep"), "it must be alltoall or flex"),
        (
            "",
            ("--cluster", "h100:1x2"),
            "(--tensor-model-parallel-size 2, --pipeline-model-parallel-size 2: from",
        ),
        ("", ("--seq-length", 513), "learned 512 positions; use at most 512"),
        ("--global-batch-size 15", (), "(--global-batch-size 15, --micro-batch-size 2: from the"),
        ("--micro-batch-size two", (), "--micro-batch-size two: it must be a whole number"),
        ("--num-layers-per-virtual-pipeline-stage 5", (), "--num-layers-per-virtual"),
        ("", ("--memory-limit", "1GB"), "no plan fits 0.93"),
    ],
)
def test_what_a_script_says_is_blamed_for_what_cannot_be(fullbore, script, change, more, said):
    script.write_text(f"{SCRIPT.strip()} {change}\n")
    ran = of_script(fullbore, script, *more)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err, ran.err


def test_modules_that_are_made_again_can_be_asked_for(fullbore, config):
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "mlp,layernorm")
    few = ("-p", 2, "--schedule", "1f1b", "--micro-batch-size", 1, "--json")
    (best, *_) = plan(fullbore, config, *flags, *few).json["plans"]
    assert best["recompute"] == "selective, layernorm and mlp"
    assert "--recompute-modules layernorm,mlp" in best["flags"]
    (whole, *_) = plan(fullbore, config, *few, "--recompute-granularity", "none").json["plans"]
    assert best["peak_bytes"] < whole["peak_bytes"] and best["step_s"] > whole["step_s"]
    assert whole["mfu"] == whole["hfu"] and best["hfu"] > best["mfu"]


def test_precision_has_a_name_or_a_switch(fullbore, config):
    few = ("-p", 2, "--schedule", "1f1b", "--micro-batch-size", 1, "--json")
    made = [plan(fullbore, config, *few, *one).json for one in (("--precision", "fp8"), ("--fp8",))]
    assert made[0] == made[1] and made[0]["precision"] == "fp8"
    ran = plan(fullbore, config, *few, "--fp16", "--precision", "bf16")
    assert "--fp16 and --precision bf16: give one precision" in ran.err


def test_a_sequence_is_as_long_as_there_are_learned_positions(fullbore):
    few = ("-p", 1, "--micro-batch-size", 1, "--global-batch-size", 8, "--cluster", "h100:1x4")
    made = fullbore("plan", "--model", CONFIGS / "gpt2", *few, "--json").json
    assert made["seq_length"] == 1024


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cluster", "h100:8y8"), "no number of devices"),
        (("--cluster", "z80:8x8"), "no device is called 'z80'; known are"),
        (("-p", 3), "--pipeline-model-parallel-size 3 x --tensor-model-parallel-size 1 does"),
        (("--schedule", "1f1b,zb-v", "-g", 4), "1f1b and zb-v have no groups; leave it out"),
        (("-p", "two"), "--pipeline-model-parallel-size two: write a number"),
        (("--micro-batch-size", 5), "--global-batch-size 16 is no multiple"),
        (("--global-batch-size", 0), "--global-batch-size 0: it must be 1 or more"),
        (("--schedule", "dualpipe"), "--schedule dualpipe: plans are made with gpipe"),
        (("--memory-limit", "0.5x"), "write bytes, such as 70GB"),
        (("--memory-limit", "-5GB"), "write bytes, such as 70GB"),
        (("--recompute-modules", "mlp"), "needs --recompute-granularity selective"),
        (
            ("--recompute-granularity", "selective", "--recompute-modules", "moe"),
            "--recompute-modules moe: small has no experts",
        ),
        (("--memory-limit", "1GB"), "no plan fits 0.93"),
        (("--recompute-granularity", "some"), "none, selective or full"),
        (("--recompute-num-layers", 2), "needs --recompute-granularity full"),
        (("--stage-layers", "7,7"), "are 14 layers; the model has 12"),
        (("--top", 0), "--top 0"),
        (("--search-time", 1), "--schedule names some: leave out either"),
        (("--search-time", -1), "--search-time -1: give seconds"),
        (("--precision", "int4"), "no precision is called 'int4'"),
        (("-o", "plan.svg"), "end the name in .html"),
        (
            ("--output-costs", "no/such/costs.json"),
            "cannot write no/such/costs.json: there is no folder",
        ),
        (("--expert-tensor-parallel-size", 0), "expert tensor parallel size 0: it must be 1"),
        (("--emit", "slurm,jax"), "--emit slurm,jax: 'jax' is none of fullbore, megatron"),
    ],
)
def test_what_means_nothing_is_refused(fullbore, config, flags, said):
    ran = plan(fullbore, config, *FEW, *flags)
    assert ran.status == 2
    assert said in ran.err
    assert not ran.out


def test_models_that_cannot_be_priced_are_refused_by_name(fullbore, config):
    file = config / "config.json"
    file.write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    assert "mamba" in plan(fullbore, config).err
    missing = {key: value for key, value in CONFIG.items() if key != "hidden_size"}
    file.write_text(json.dumps(missing))
    assert "hidden_size is missing" in plan(fullbore, config).err
    assert "no file" in plan(fullbore, config / "nowhere").err


def test_ctrl_c_keeps_the_best_so_far(fullbore, config, monkeypatch):
    consider, count = planner._Planner.consider, iter(range(10**6))

    def pressed(self, choice):
        consider(self, choice)
        if next(count) == 20:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(planner._Planner, "consider", pressed)
    ran = plan(fullbore, config, "--json")
    assert ran.status == 0
    assert not ran.json["complete"] and ran.json["plans"]
    assert "interrupted; this is the best so far" in ran.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_before_the_first_plan_is_an_interruption(fullbore, config, monkeypatch):
    def pressed(self, choice):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(planner._Planner, "consider", pressed)
    ran = plan(fullbore, config, "-o", config / "plan.html")
    assert (ran.status, ran.out) == (130, "")
    assert "stopped before any plan was found" in ran.err
    assert not (config / "plan.html").exists()
