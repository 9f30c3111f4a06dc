"""Scripts for Fullbore, DeepSpeed and torchtitan: what they start, read by the real parsers."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import started_with, write_files
from planning import chosen, found_job, job

from fullbore.cli.main import main
from fullbore.cost.model import Precision, Recompute
from fullbore.cost.model.config import read_config
from fullbore.cost.model.hugging_face import shape_of
from fullbore.errors import ConfigError
from fullbore.ir import Schedule
from fullbore.plan import plan
from fullbore.plan.emit.deepspeed import deepspeed_config, deepspeed_launch, stage_starts
from fullbore.plan.emit.fullbore import fullbore_arguments, fullbore_launch
from fullbore.plan.emit.torchtitan import (
    modules,
    schedule_name,
    torchtitan_config,
    torchtitan_launch,
)
from fullbore.plan.emit.torchtitan_models import UNKNOWN, model_of
from fullbore.plan.engines import ENGINES, check, engine_of

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
FULL = Recompute(granularity="full")


# -- what each engine can do ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "more"),
    [
        ("fullbore", "cuts no layer's width; plan with --tensor-model-parallel-size 1",
         {"tensor": 2}),
        ("deepspeed", "--tensor-model-parallel-size 2: DeepSpeed cuts", {"tensor": 2}),
        ("deepspeed", "DeepSpeed has no schedule gis: plan with --schedule 1f1b",
         {"schedule": "gis", "virtual_stages": 2}),
        ("deepspeed", "--recompute-num-layers 2: DeepSpeed computes all layers again or none",
         {"recompute": Recompute(granularity="full", layers=2)}),
        ("fullbore", "--recompute-granularity selective: Fullbore's engine has nothing like it",
         {"recompute": Recompute(granularity="selective")}),
        ("torchtitan", "plan with --use-distributed-optimizer",
         {"asked": {"distributed": False}}),
        ("torchtitan", "leave one replica", {"cluster": "h100:1x2"}),
        ("torchtitan", "does not share a tied embedding",
         {"config": {"tie_word_embeddings": True}}),
        ("torchtitan", "torchtitan places stages in turn or in one V; plan with 2",
         {"schedule": "hanayo", "virtual_stages": 4}),
        ("torchtitan", "keeps main weights and moments in 32 bits; leave it out of the script, or",
         {"asked": {"precision": replace(Precision.named("bf16"), moments=4.0)}}),
        ("fullbore", "--optimizer sgd: Fullbore's engine has adam here",
         {"asked": {"optimizer": "sgd"}}),
        ("deepspeed", "--optimizer muon: DeepSpeed has adam and sgd here",
         {"asked": {"optimizer": "muon"}}),
        ("fullbore", "does not train in fp16: plan with --precision bf16 or fp32",
         {"asked": {"precision": Precision.named("fp16")}}),
        ("fullbore", "the nearest legal", {"schedule": "interleaved", "virtual_stages": 2,
         "asked": {"global_batch": 20}}),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_named_with_what_would_do(name, said, more):
    question, _, choice = chosen(**more)
    with pytest.raises(ConfigError) as error:
        check(engine_of(name), question, choice)
    assert said in str(error.value)


def test_plans_keep_to_what_engines_run():
    for engine in ENGINES:
        question, _, _ = chosen(asked={"engines": (engine,)})
        fixed = replace(question.fixed, tensor=(1, 2), microbatch_size=(2, 4))
        for one in plan(replace(question, fixed=fixed), top=3).best:
            check(engine, question, one.choice)


@pytest.mark.parametrize(
    ("name", "fixed", "said"),
    [
        ("deepspeed", {"schedules": ("gpipe",)}, "DeepSpeed has no schedule gpipe"),
        ("deepspeed", {"virtual_stages": (2,)}, "DeepSpeed has no schedule .*--schedule 1f1b"),
        ("fullbore", {"context": (2,)}, "plan with --context-parallel-size 1"),
        ("torchtitan", {"recompute": (Recompute(granularity="selective"),)}, "none or full"),
    ],
)
def test_what_was_fixed_and_cannot_be_is_refused_before_planning(name, fixed, said):
    question, _, _ = chosen()
    asked = replace(question.fixed, engines=(engine_of(name),), **fixed)
    with pytest.raises(ConfigError, match=said):
        plan(replace(question, fixed=asked))


# -- fullbore -------------------------------------------------------------------------------------


def settings_of(monkeypatch, arguments):
    """The settings that `fullbore train` makes of arguments; nothing runs."""
    found = []
    monkeypatch.setattr("fullbore.cli.train._run", found.append)
    with pytest.raises(SystemExit) as left:
        main(["train", *arguments])
    assert not left.value.code
    (settings,) = found
    return settings


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"schedule": "interleaved", "virtual_stages": 2, "group": 2, "recompute": FULL},
        {"schedule": "zb-v", "virtual_stages": 2, "layers": (3, 3, 4, 2)},
        {"recompute": Recompute(granularity="full", layers=2), "layers": (7, 5)},
        {"asked": {"overlap_messages": False}},
        {"cluster": "h100:2x2", "asked": {"distributed": False}},
    ],
)
def test_fullbore_takes_what_its_script_says(monkeypatch, tmp_path, more):
    made = job(**more)
    launch = fullbore_launch(made)
    folder = write_files(tmp_path / "launch", launch.files)
    told = started_with(folder / launch.script, "--train-iters", "7", env={"HEAD": "first"})
    module = told.index("-m")
    assert told[module + 1 : module + 3] == ["fullbore", "train"]
    nodes = made.question.cluster.nodes
    assert ("--standalone" in told) == (nodes == 1)
    assert nodes == 1 or told[told.index("--rdzv-endpoint") + 1] == "first:29500"
    settings = settings_of(monkeypatch, told[module + 3 :])
    choice, spread = made.choice, made.choice.spread
    shape = settings.shape(12)
    assert (shape.schedule, shape.ranks, shape.virtual_stages, shape.layers, shape.group_size) == (
        choice.schedule, spread.pipeline, choice.virtual_stages, choice.layers, choice.group,
    )  # fmt: skip
    assert settings.data_parallel_size == spread.data == 2
    assert settings.microbatches == spread.microbatches
    assert settings.use_distributed_optimizer == spread.distributed
    assert settings.overlap_p2p_communication == made.question.overlap_messages
    assert settings.bf16
    again = choice.recompute
    nothing_said = "placed"  # what has an R in the schedule: none of these has
    assert settings.recomputation == (
        nothing_said if again.granularity == "none" else again.layers or again.granularity
    )
    assert (settings.train_iters, settings.save_interval, settings.from_scratch) == (7, 2000, True)
    assert settings.model == "models/small" and settings.data == ("stdlib",)


def test_plans_in_32_bits_train_in_32_bits(tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('base = "h100"\nfp32_tflop_per_s = 60\n')
    made = job(cluster=f"{cluster}:1x4", asked={"precision": Precision.named("fp32")})
    assert "--fp32" in fullbore_arguments(made)
    assert "bf16" not in deepspeed_config(made)
    assert torchtitan_config(made)["training"]["mixed_precision_param"] == "float32"


def test_a_schedule_that_was_found_is_a_file(monkeypatch, tmp_path):
    made = found_job()
    launch = fullbore_launch(made)
    folder = write_files(tmp_path / "launch", launch.files)
    told = started_with(folder / launch.script)
    shape = settings_of(monkeypatch, told[told.index("train") + 1 :]).shape(12)
    assert shape.build() == made.schedule == Schedule.from_csv(folder / "schedule.csv")
    assert shape.layers == made.choice.layers


def test_a_script_says_which_model_and_goes_on(tmp_path):
    launch = fullbore_launch(job(model='it\'s $5/a "model"', from_scratch=False))
    folder = write_files(tmp_path / "launch", launch.files)
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "latest").touch()
    told = started_with(folder / launch.script, env={"SAVE": str(saved)})
    assert told[told.index("--model") + 1] == 'it\'s $5/a "model"'
    assert told[told.index("--load") + 1] == str(saved)
    assert "--from-scratch" not in told
    nameless = fullbore_launch(job(model=None)).files[0].text
    assert 'MODEL="${MODEL:?' in nameless


# -- deepspeed ------------------------------------------------------------------------------------


def files_of(launch):
    return {file.name: file.text for file in launch.files}


def test_deepspeed_gets_its_configuration_and_stages(tmp_path):
    made = job(cluster="h100:2x2", layers=(7, 5), recompute=FULL)
    launch = deepspeed_launch(made)
    folder = write_files(tmp_path / "launch", launch.files)
    told = started_with(
        folder / "deepspeed.sh", "--mine", env={"TRAIN": "train.py", "HEAD": "first"}
    )
    assert told[-5:] == [
        "train.py", "--deepspeed", "--deepspeed_config", str(folder / "deepspeed.json"), "--mine",
    ]  # fmt: skip
    config = json.loads(files_of(launch)["deepspeed.json"])
    assert config.pop("_comment")[0] == "Written by a test."
    assert (
        config["train_batch_size"]
        == config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2
        == 16
    )
    assert config["pipeline"] == {"stages": 2, "activation_checkpoint_interval": 1}
    assert stage_starts(made) == (0, 8)
    stages = files_of(launch)["deepspeed_stages.py"]
    assert re.search(r"^STARTS = \[0, 8\]$", stages, re.MULTILINE)
    compile(stages, "deepspeed_stages.py", "exec")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_deepspeed_reads_its_configuration(precision, distributed, monkeypatch, tmp_path):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed is not installed")
    asked = {"precision": Precision.named(precision), "distributed": distributed}
    launch = deepspeed_launch(job(asked=asked))
    folder = write_files(tmp_path / "launch", launch.files)
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    replicas = SimpleNamespace(get_data_parallel_world_size=lambda: 2)
    read = config.DeepSpeedConfig(str(folder / "deepspeed.json"), mpu=replicas)
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (16, 4)
    assert read.zero_optimization_stage == int(distributed)
    assert read.bfloat16_config.enabled == (precision == "bf16")
    assert read.pipeline["stages"] == 2
    summed = "fp32" if precision == "bf16" and distributed else None
    assert (read.optimizer_name, read.grad_accum_dtype) == ("adamw", summed)
    if precision == "bf16" and distributed:
        small = replace(asked["precision"], gradient=2.0, moments=4.0)
        launch = deepspeed_launch(job(asked={"precision": small, "optimizer": "sgd"}))
        folder = write_files(tmp_path / "sgd", launch.files)
        read = config.DeepSpeedConfig(str(folder / "deepspeed.json"), mpu=replicas)
        assert (read.optimizer_name, read.grad_accum_dtype) == ("SGD", "bf16")
        assert read.zero_allow_untested_optimizer


# -- torchtitan -----------------------------------------------------------------------------------


def test_torchtitan_gets_its_configuration(tmp_path):
    made = job(
        cluster="h100:2x4", tensor=2, schedule="interleaved", virtual_stages=2, group=2,
        layers=(3, 3, 4, 2),
    )  # fmt: skip
    launch = torchtitan_launch(made)
    folder = write_files(tmp_path / "launch", launch.files)
    env = {"HEAD": "first", "ASSETS": "assets"}
    told = started_with(folder / "torchtitan.sh", "--training.steps", "5", env=env)
    assert told[told.index("-m") + 1] == "torchtitan.train" and told[-1] == "5"
    assert told[told.index("--job.config_file") + 1] == str(folder / "torchtitan.toml")
    config = tomllib.loads(files_of(launch)["torchtitan.toml"])
    assert config["training"]["local_batch_size"] * 2 == config["training"]["global_batch_size"]
    how = config["parallelism"]
    assert how["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert "pipeline_parallel_schedule_csv" not in how
    assert how["module_fqns_per_model_part"][0] == [
        "tok_embeddings", "layers.0", "layers.1", "layers.2",
    ]  # fmt: skip
    assert how["module_fqns_per_model_part"][3] == ["layers.10", "layers.11", "norm", "output"]
    assert (how["tensor_parallel_degree"], how["data_parallel_shard_degree"]) == (2, 2)
    assert "torchtitan 0.2.2 has no model of this shape" in files_of(launch)["torchtitan.toml"]


@pytest.mark.parametrize(
    ("more", "named", "placed"),
    [
        ({"schedule": "1f1b"}, "1F1B", None),
        ({"schedule": "gpipe"}, "GPipe", None),
        ({"schedule": "interleaved", "virtual_stages": 2, "group": 4}, None, "Interleaved1F1B"),
        ({"schedule": "dualpipe-v", "virtual_stages": 2}, "DualPipeV", None),
        ({"schedule": "zb-h1"}, None, "Interleaved1F1B"),
        ({"schedule": "v-min", "virtual_stages": 2}, None, "ZBVZeroBubble"),
        ({"schedule": "hanayo", "virtual_stages": 2}, None, "ZBVZeroBubble"),
    ],
)
def test_torchtitan_runs_any_order_by_name_or_from_a_file(tmp_path, more, named, placed):
    made = job(**more)
    assert schedule_name(made.choice) == named
    launch = torchtitan_launch(made)
    how = tomllib.loads(files_of(launch)["torchtitan.toml"])["parallelism"]
    assert how["pipeline_parallel_schedule"] == (named or placed)
    folder = write_files(tmp_path / "launch", launch.files)
    assert (folder / "schedule.csv").exists() == (named is None)
    if named is None:
        assert Schedule.from_csv(folder / "schedule.csv") == made.schedule
        told = started_with(folder / "torchtitan.sh", env={"ASSETS": "assets"})
        flag = told.index("--parallelism.pipeline_parallel_schedule_csv")
        assert told[flag + 1] == str(folder / "schedule.csv")


def test_stages_without_layers_keep_the_head():
    _, _, choice = chosen(layers=(12, 0))
    assert modules(choice)[1] == ["norm", "output"]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("llama3-8b", ("llama3", "8B")),
        ("llama3-405b", ("llama3", "405B")),
        ("qwen3-8b", ("qwen3", "8B")),
        ("qwen3-30b-a3b", ("qwen3", "30B-A3B")),
        ("deepseek-v3", ("deepseek_v3", "671B")),
        ("mixtral-8x7b", UNKNOWN),
    ],
)
def test_models_of_torchtitan_are_known_by_their_shape(name, model):
    assert model_of(shape_of(read_config(CONFIGS / name))) == model


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_torchtitan_reads_its_configuration(schedule, tmp_path):
    manager = pytest.importorskip("torchtitan.config.manager", reason="torchtitan is not installed")
    made = job(schedule=schedule, virtual_stages=1 + (schedule == "zb-v"), recompute=FULL)
    folder = write_files(tmp_path / "launch", torchtitan_launch(made).files)
    told = started_with(folder / "torchtitan.sh", env={"ASSETS": str(tmp_path)})
    read = manager.ConfigManager().parse_args(told[told.index("torchtitan.train") + 1 :])
    assert read.parallelism.module_fqns_per_model_part == modules(made.choice)
    assert read.training.global_batch_size == 16 and read.training.local_batch_size == 8
    assert read.activation_checkpoint.mode == "full" and read.checkpoint.enable
    assert read.optimizer.name == "AdamW"
