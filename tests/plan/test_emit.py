"""Launch files say what the plan says, read back by our own reader and by Megatron's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning import chosen, job

from fullbore.cost.hardware import Capture, Overlap
from fullbore.cost.model import Kernels, Precision, Recompute
from fullbore.cost.model.script import read_flags
from fullbore.errors import ConfigError
from fullbore.plan.emit import megatron_arguments
from fullbore.plan.emit.megatron import layout, megatron_launch

TWO = {
    "cluster": "h100:1x8",
    "tensor": 2,
    "schedule": "interleaved",
    "virtual_stages": 2,
    "group": 2,
}


def test_flags_are_read_back_as_they_were_meant(tmp_path):
    (script,) = megatron_launch(job(**TWO, layers=(3, 3, 4, 2))).files
    file = tmp_path / script.name
    file.write_text(script.text)
    flags = read_flags(str(file))
    assert flags["pipeline_model_parallel_size"] == ("2",)
    assert flags["tensor_model_parallel_size"] == ("2",)
    assert flags["micro_batch_size"] == ("2",) and flags["global_batch_size"] == ("16",)
    assert flags["pipeline_model_parallel_layout"] == ("Ettt|ttt|tttt|ttL",)
    assert flags["sequence_parallel"] == flags["use_distributed_optimizer"] == ()
    assert "num_virtual_stages_per_pipeline_rank" not in flags


def test_equal_stages_need_no_layout():
    question, _, choice = chosen(**TWO, layers=(3,) * 4)
    told = megatron_arguments(question, choice)
    assert "--num-virtual-stages-per-pipeline-rank 2" in told
    assert not any("layout" in line for line in told)


def test_experts_beside_another_microbatch_are_told():
    question, _, choice = chosen(**TWO)
    question = replace(question, overlap=Overlap(expert=True))
    flag = "--overlap-moe-expert-parallel-comm"
    assert flag not in " ".join(megatron_arguments(question, choice))
    spread = replace(choice.spread, expert=2)
    assert flag in " ".join(megatron_arguments(question, replace(choice, spread=spread)))


def test_graphs_dispatcher_and_casts_in_blocks_are_told():
    question, _, choice = chosen(**TWO)
    capture = Capture(implementation="transformer_engine", modules=("attn", "moe_router"))
    narrow = Precision.named("fp8_mx")
    kernels = Kernels(dispatcher="flex")
    question = replace(question, capture=capture, precision=narrow, kernels=kernels)
    spread = replace(choice.spread, expert=2)
    told = " ".join(megatron_arguments(question, replace(choice, spread=spread)))
    assert "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router" in told
    assert "--moe-token-dispatcher-type flex" in told
    assert "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8" in told


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        (Recompute(granularity="selective"), ["--recompute-granularity selective"]),
        (
            Recompute(granularity="selective", modules=("layernorm", "mlp")),
            ["--recompute-granularity selective", "--recompute-modules layernorm mlp"],
        ),
        (Recompute(granularity="full"), ["--recompute-method uniform --recompute-num-layers 1"]),
        (
            Recompute(granularity="full", layers=2),
            ["--recompute-granularity full", "--recompute-method block --recompute-num-layers 2"],
        ),
    ],
)
def test_recomputation_is_told(recompute, said):
    question, _, choice = chosen(**TWO, recompute=recompute)
    assert set(said) <= set(megatron_arguments(question, choice))


def test_what_megatron_has_not_is_refused():
    question, _, choice = chosen(**TWO)
    with pytest.raises(ConfigError, match="no schedule gis: plan with --schedule 1f1b,interleaved"):
        megatron_arguments(question, replace(choice, schedule="gis"))
    short = replace(choice.spread, microbatches=3)
    with pytest.raises(ConfigError, match="the nearest legal M"):
        megatron_arguments(question, replace(choice, spread=short))


@pytest.mark.parametrize(
    ("layers", "ranks"), [((3, 4, 3, 2), 2), ((2, 2, 2, 2, 2, 2, 2, 0), 4), ((5, 4, 4, 4), 4)]
)
def test_layouts_are_what_megatron_reads(layers, ranks):
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    from megatron.core.transformer.enums import LayerType

    read = module.PipelineParallelLayerLayout(layout(layers), ranks)
    read.validate_layer_layout(num_layers=sum(layers), mtp_num_layers=None)
    further = module.PipelineParallelLayerLayout(layout(layers, 1), ranks)
    further.validate_layer_layout(num_layers=sum(layers), mtp_num_layers=1)
    counts = [
        read.layout[stage % ranks][stage // ranks].count(LayerType.decoder)
        for stage in range(len(layers))
    ]
    assert tuple(counts) == layers
