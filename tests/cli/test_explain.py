"""`fullbore explain` on the flags that people have: scripts, lines, YAML, stdin."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "examples"

# Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh: its values, as they are.
GPT3 = """
#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=1
VOCAB_FILE=$3 #<Specify path to file>/gpt2-vocab.json
MERGE_FILE=$4 #<Specify path to file>/gpt2-merges.txt
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --fp16
    --lr 6.0e-5
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
MODEL_PARALLEL_ARGS=(
\t--tensor-model-parallel-size 8
\t--pipeline-model-parallel-size 16
)
DATA_ARGS=(
    --vocab-file $VOCAB_FILE
    --merge-file $MERGE_FILE
    --split 949,50,1
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} ${DATA_ARGS[@]}
"""


def explained(fullbore, source, *more, cluster="h100:8x8"):
    return fullbore("explain", "--megatron", source, "--cluster", cluster, *more)


@pytest.fixture
def gpt3(tmp_path):
    script = tmp_path / "train_gpt3_175b_distributed.sh"
    script.write_text(GPT3)
    return script


def test_the_public_gpt3_script(fullbore, gpt3):
    ran = explained(fullbore, gpt3, "--json", cluster="a100:64x8")
    assert ran.status == 1, ran.err  # --train-iters and --rampup-batch-size
    made = ran.json
    (violation,) = made["violations"]
    assert violation["message"].startswith("--rampup-batch-size and --train-iters exclude")
    assert [edit["text"] for edit in violation["nearest"]] == [
        "no --rampup-batch-size",
        "no --train-iters",
    ]
    plan = made["plan"]
    assert (plan["tensor_model_parallel_size"], plan["pipeline_model_parallel_size"]) == (8, 16)
    assert (plan["data_parallel_size"], plan["num_microbatches"]) == (4, 384)
    assert plan["schedule"] == "1f1b" and plan["stage_layers"] == [6] * 16
    assert len(made["total_bytes"]) == 16
    assert made["bubble_fraction"] == pytest.approx(sum(made["bubble_parts"].values()))
    assert any("the script starts 1 x 8 processes" in text for text in made["assumed"])
    assert any("GPT-2's vocabulary" in text for text in made["assumed"])
    assert "--split" in made["not_looked_at"] and "--lr" in made["not_looked_at"]


def test_llama_as_a_script(fullbore):
    ran = explained(fullbore, SCRIPTS / "megatron" / "llama3-70b.sh", "--json")
    made = ran.json
    assert made["legal"] and made["violations"] == [] and made["mended"]["flags"] == {}
    plan = made["plan"]
    assert (plan["schedule"], plan["virtual_stages"], plan["group_size"]) == ("interleaved", 4, 4)
    assert (plan["data_parallel_size"], plan["num_microbatches"]) == (2, 64)
    assert plan["stage_layers"] == [5] * 16
    assert ran.status == int(not made["fits"])
    assert sum(made["step_parts"].values()) == pytest.approx(plan["step_s"])
    assert 0 < plan["mfu"] <= plan["hfu"] < 1
    assert made["best_change"] == made["changes"][0]


def test_mixtral_as_a_script(fullbore):
    made = explained(fullbore, SCRIPTS / "megatron" / "mixtral-8x7b.sh", "--json").json
    assert made["legal"] and made["fits"], made
    assert made["plan"]["expert_model_parallel_size"] == 8
    texts = [one["text"] for one in made["changes"]]
    assert made["changes_tried"] >= len(texts) + len(made["changes_too_large"]) > 0


SMALL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 "
    "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 "
    "--global-batch-size 16 --bf16 --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer"
)


def test_an_explanation_in_words(fullbore):
    ran = explained(fullbore, f"{SMALL} --lr 1 --num-query-groups 4", cluster="h100:1x8")
    assert ran.status == 0, ran.err
    for part in (
        "megatron (8 layers, hidden 1024) on h100:1x8",
        "legal: Megatron-LM refuses none of these flags",
        "ranks     TP 2 x PP 2 x DP 2; sequence parallel; distributed optimizer",
        "schedule  1f1b, microbatches of 1; recompute none",
        "GiB of 80 GiB on rank",
        "of the ranks' time in the pipeline: warm-up",
        "memory of each rank, GiB",
        "where the step goes",
        "the one change that helps most\n  --",
        "% faster",
        "ignored by Megatron-LM\n  --num-query-groups: without --group-query-attention",
        "not looked at\n  --lr",
        "allowance: 2 GiB",
    ):
        assert part in ran.out, part


def test_flags_from_stdin_that_are_illegal_in_five_ways(fullbore, monkeypatch):
    typed = (
        SMALL.replace("parallel-size 2", "parallel-size 3", 1)
        .replace("--global-batch-size 16", "--global-batch-size 18")
        .replace("--bf16", "--bf16 --fp16")
    )
    typed += " --recompute-granularity full --overlap-param-gather"
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    ran = explained(fullbore, "-", cluster="h100:1x8")
    assert ran.status == 1, ran.err
    for part in (
        "--tensor-model-parallel-size 3 does not divide the 16 attention heads",
        "= 6 does not divide the 8 devices of h100:1x8",
        "--fp16 and --bf16 exclude each other",
        "full needs --recompute-method uniform or block",
        "--overlap-param-gather needs --overlap-grad-reduce",
        "legal: --tensor-model-parallel-size 2 or 4",
        "figures below are with --tensor-model-parallel-size",
        "the one change that helps most",
    ):
        assert part in " ".join(ran.out.split()), part


def test_a_job_that_does_not_fit(fullbore):
    flags = f"{SMALL} --micro-batch-size 4"
    made = explained(fullbore, flags, "--json", cluster="h100:1x8").json
    limit = f"{made['plan']['peak_bytes'] * 0.9:.0f}B"
    ran = explained(fullbore, flags, "--memory-limit", limit, cluster="h100:1x8")
    assert ran.status == 1 and "it does not fit: rank" in ran.out
    assert "what makes it fit at the least cost\n  --" in ran.out and "too large: --" in ran.out
    ran = explained(fullbore, flags, "--memory-limit", "2.2GB", cluster="h100:1x8")
    assert "none makes it fit" in ran.out


def test_a_file_of_yaml_and_a_file_of_the_cluster(fullbore, tmp_path):
    pytest.importorskip("yaml")
    cluster, job = tmp_path / "ours.toml", tmp_path / "job.yaml"
    cluster.write_text('base = "h100"\nnodes = 1\n')
    lines = SMALL.removeprefix("--").split(" --")
    job.write_text("\n".join(f"{a.split()[0]}: {[*a.split(), 'true'][1]}" for a in lines))
    made = explained(fullbore, job, "--json", cluster=cluster).json
    assert (made["model"], made["legal"], made["devices"]) == ("job", True, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give --megatron and --cluster too"),
        (("--megatron", SMALL), "give --cluster too"),
        (("--megatron", "nothing", "--cluster", "h100:8"), "no --flag is in 'nothing'"),
        (("--megatron", SMALL, "--cluster", "z80:8"), "no device is called 'z80'"),
        (("--megatron", SMALL, "--cluster", "h100:8", "--top", 0), "--top 0"),
        (("--megatron", SMALL, "--cluster", "h100:8", "--memory-limit", "9TB"), "--memory-limit"),
    ],
)
def test_what_means_nothing_is_refused(fullbore, arguments, said):
    ran = fullbore("explain", *arguments)
    assert ran.status == 2 and said in ran.err and not ran.out


def test_flags_without_a_model_have_no_figures(fullbore):
    ran = explained(fullbore, "--micro-batch-size 1 --seq-length 8", "--json", cluster="h100:8")
    assert ran.status == 1
    assert ran.json["plan"] is None and ran.json["mended"] is None
    assert "--hidden-size is missing" in ran.json["violations"][0]["message"]
    assert "no figures" in explained(fullbore, "--micro-batch-size 1", cluster="h100:8").out
