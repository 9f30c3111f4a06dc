"""Megatron's flags: the arithmetic that it checks late or never is refused with a way out."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullbore.errors import ConfigError, ScheduleError
from fullbore.megatron import (
    add_pipeline_optimization_args,
    count_microbatches,
    schedule_from_args,
    shape_from_args,
    split_layers,
)
from fullbore.schedules import interleaved, one_f_one_b


def parse(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_pipeline_optimization_args(parser)
    return parser.parse_args(text.split())


def refusal(text: str) -> str:
    with pytest.raises((ConfigError, ScheduleError)) as caught:
        schedule_from_args(parse(text))
    return str(caught.value)


SNIPPET = (
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 "
    "--micro-batch-size 1 --global-batch-size 8 --overlap-p2p-communication --num-layers 16"
)


def test_the_snippet_that_everyone_types_gives_interleaved_1f1b() -> None:
    args = parse(SNIPPET)
    assert args.overlap_p2p_communication is True
    assert schedule_from_args(args) == interleaved(ranks=4, microbatches=8, virtual_stages=2)
    assert shape_from_args(args).layers == (2,) * 8


def test_without_virtual_stages_it_is_1f1b() -> None:
    args = parse("--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 12")
    assert schedule_from_args(args) == one_f_one_b(ranks=2, microbatches=6)


def test_no_overlap_form() -> None:
    assert parse("--no-overlap-p2p-communication").overlap_p2p_communication is False


def test_group_size_reaches_the_schedule() -> None:
    args = parse(
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 4 --micro-batch-size 1 "
        "--global-batch-size 8"
    )
    made = schedule_from_args(args)
    wanted = interleaved(ranks=2, microbatches=8, virtual_stages=2, microbatch_group_size=4)
    assert made == wanted
    assert made != interleaved(ranks=2, microbatches=8, virtual_stages=2)


def test_data_parallel_size_is_what_world_size_leaves() -> None:
    args = parse("--pipeline-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 32")
    args.world_size, args.tensor_model_parallel_size = 16, 2
    assert shape_from_args(args).microbatches == 32 // 2 // 2
    args.world_size = 12
    with pytest.raises(ConfigError, match="8 or 16"):
        shape_from_args(args)


def test_flags_that_a_parser_has_already_are_left_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batch-size", type=int, default=3)
    add_pipeline_optimization_args(parser)
    args = parser.parse_args(["--pipeline-model-parallel-size", "2", "--global-batch-size", "12"])
    assert args.micro_batch_size == 3
    assert schedule_from_args(args).microbatches == 4


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        # 30 layers over 4 ranks must not become 28
        ("--pipeline-model-parallel-size 4 --num-layers 30 --micro-batch-size 1", "28 or 32"),
        # 3 virtual stages do not divide the 4 layers of a rank
        (
            "--pipeline-model-parallel-size 4 --num-layers 16 --micro-batch-size 1 "
            "--num-virtual-stages-per-pipeline-rank 3",
            "2 or 4",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers 16 --micro-batch-size 1 "
            "--num-layers-per-virtual-pipeline-stage 3",
            "2 or 4",
        ),
        (
            "--pipeline-model-parallel-size 4 --micro-batch-size 1 "
            "--num-virtual-stages-per-pipeline-rank 0",
            "value is 1",
        ),
        # G < P
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--micro-batch-size 1 --global-batch-size 8 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            "value is 4",
        ),
        # a last group of 2 < P
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--micro-batch-size 1 --global-batch-size 10",
            "8 or 12",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--micro-batch-size 1 --global-batch-size 17 "
            "--microbatch-group-size-per-virtual-pipeline-stage 8",
            "16 or 20",
        ),
        ("--pipeline-model-parallel-size 2 --micro-batch-size 3 --global-batch-size 10", "9 or 12"),
        ("--pipeline-model-parallel-size 0 --micro-batch-size 1", "value is 1"),
        ("--pipeline-model-parallel-size 2 --micro-batch-size 0", "value is 1"),
        ("--pipeline-model-parallel-size 2", "--micro-batch-size is missing"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
            "--micro-batch-size 1",
            "needs --num-layers",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
            "--num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1 --num-layers 8",
            "give one of them",
        ),
        # the remaining layers must divide over the remaining ranks
        (
            "--pipeline-model-parallel-size 4 --num-layers 14 --micro-batch-size 1 "
            "--decoder-last-pipeline-num-layers 3",
            "2 or 5",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 14 --micro-batch-size 1 "
            "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 3",
            "sum up to 14",
        ),
        (
            "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 4 "
            "--schedule gpipe --num-virtual-stages-per-pipeline-rank 2",
            "one stage a rank",
        ),
    ],
)
def test_refusals_name_the_nearest_legal_values(flags: str, names: str) -> None:
    assert names in refusal(flags)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"layers": 14, "ranks": 4, "last": 2}, (4, 4, 4, 2)),
        ({"layers": 30, "ranks": 4, "first": 8, "last": 6}, (8, 8, 8, 6)),
        ({"layers": 30, "ranks": 2, "first": 16}, (16, 14)),
        ({"layers": 16, "ranks": 2, "virtual_stages": 2, "first": 10}, (5, 3, 5, 3)),
        ({"layers": 5, "ranks": 1, "first": 5}, (5,)),
    ],
)
def test_uneven_splits(options: dict[str, int], wanted: tuple[int, ...]) -> None:
    assert split_layers(**options) == wanted


@given(
    layers=st.integers(1, 60),
    ranks=st.integers(1, 12),
    virtual_stages=st.integers(1, 4),
    first=st.none() | st.integers(0, 12),
    last=st.none() | st.integers(0, 12),
)
def test_a_split_covers_every_layer_once_with_no_empty_stage(
    layers: int, ranks: int, virtual_stages: int, first: int | None, last: int | None
) -> None:
    try:
        split = split_layers(
            layers=layers, ranks=ranks, virtual_stages=virtual_stages, first=first, last=last
        )
    except ConfigError:
        return
    assert sum(split) == layers
    assert len(split) == ranks * virtual_stages
    assert min(split) >= 1


def test_microbatches_default_to_one_a_replica() -> None:
    assert count_microbatches(global_batch_size=None, micro_batch_size=4) == 1
    assert count_microbatches(global_batch_size=48, micro_batch_size=2, data_parallel_size=3) == 8


def test_needs_no_torch() -> None:
    code = "import sys, fullbore.megatron; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
