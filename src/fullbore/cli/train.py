"""`fullbore train`: fine-tune or train a causal language model through a pipeline."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from fullbore.cli import training_options as flags
from fullbore.cli.place import is_under_torchrun, place_here, processes
from fullbore.errors import RankError

if TYPE_CHECKING:
    from fullbore.train.settings import TrainSettings

__all__ = ["train"]


def train(
    context: typer.Context,
    *,
    model: flags.Model = None,
    data: flags.Data = None,
    from_scratch: flags.FromScratch = None,
    seq_length: flags.SeqLength = None,
    held_out: flags.HeldOut = None,
    pipeline_model_parallel_size: flags.Ranks = None,
    data_parallel_size: flags.DataParallelSize = None,
    schedule: flags.Schedule = None,
    num_layers_per_virtual_pipeline_stage: flags.LayersPerVirtualStage = None,
    num_virtual_stages_per_pipeline_rank: flags.VirtualStages = None,
    microbatch_group_size_per_virtual_pipeline_stage: flags.GroupSize = None,
    slices: flags.Slices = None,
    stage_layers: flags.StageLayers = None,
    decoder_first_pipeline_num_layers: flags.FirstLayers = None,
    decoder_last_pipeline_num_layers: flags.LastLayers = None,
    overlap_p2p_communication: flags.Overlap = None,
    recompute: flags.Recompute = None,
    recompute_granularity: flags.RecomputeGranularity = None,
    recompute_method: flags.RecomputeMethod = None,
    recompute_num_layers: flags.RecomputeLayers = None,
    offload: flags.Offload = None,
    offload_ahead: flags.OffloadAhead = None,
    micro_batch_size: flags.MicroBatchSize = None,
    global_batch_size: flags.GlobalBatchSize = None,
    train_iters: flags.TrainIters = None,
    lr: flags.Lr = None,
    min_lr: flags.MinLr = None,
    lr_warmup_iters: flags.LrWarmupIters = None,
    weight_decay: flags.WeightDecay = None,
    clip_grad: flags.ClipGrad = None,
    use_distributed_optimizer: flags.DistributedOptimizer = None,
    optimizer_barrier: flags.OptimizerBarrier = None,
    adam_beta1: flags.AdamBeta1 = None,
    adam_beta2: flags.AdamBeta2 = None,
    adam_eps: flags.AdamEps = None,
    seed: flags.Seed = None,
    bf16: flags.Bf16 = None,
    device: flags.Device = None,
    threads: flags.Threads = None,
    stall_timeout: flags.StallTimeout = None,
    distributed_timeout_minutes: flags.DistributedTimeout = None,
    config: flags.Config = None,
    save: flags.Save = None,
    save_interval: flags.SaveInterval = None,
    load: flags.Load = None,
    export: flags.Export = None,
    data_cache_path: flags.DataCachePath = None,
    tensorboard_dir: flags.TensorboardDir = None,
    log_interval: flags.LogInterval = None,
    eval_interval: flags.EvalInterval = None,
    eval_iters: flags.EvalIters = None,
) -> None:
    """Train a causal language model through a pipeline.

    On one machine the ranks are started here; under torchrun this process joins as one of them:
    torchrun --nproc-per-node 2 -m fullbore train -p 2 ...
    """
    from fullbore.train.settings import TrainSettings, read_config

    given = {name: value for name, value in context.params.items() if value not in (None, (), [])}
    given.pop("config", None)
    from_file = read_config(config) if config is not None else {}
    where = "command line" if config is None else f"command line and {config}"
    settings = TrainSettings.of(_with_replicas({**from_file, **given}), where=where)
    _run(settings)


def _with_replicas(values: dict[str, Any]) -> dict[str, Any]:
    """Under torchrun the number of replicas follows from that of processes, as in Megatron."""
    ranks = values.get("pipeline_model_parallel_size", 1)
    if "data_parallel_size" in values or not is_under_torchrun() or not isinstance(ranks, int):
        return values
    if ranks < 1 or processes() % ranks:
        return values
    return {**values, "data_parallel_size": processes() // ranks}


def _run(settings: TrainSettings) -> None:
    """Join as a rank of torchrun's, be the only rank, or start the ranks."""
    if is_under_torchrun():
        _be_one_of_many(settings)
        return
    _check_before_launch(settings)
    if settings.world_size == 1:
        _be_rank(settings)
        return
    from fullbore.train.launch import launch_ranks

    needed = ("fullbore.train.rank", "transformers.modeling_utils")
    launch_ranks(_be_rank, settings, ranks=settings.world_size, imports=needed)


def _check_before_launch(settings: TrainSettings) -> None:
    """What can be refused before anything runs, which is all arithmetic."""
    from fullbore.train.sources import count_layers, find_model

    folder = find_model(
        settings.model, cache=settings.cache, needs_weights=not settings.from_scratch
    )
    layers = count_layers(folder)
    if layers is not None:
        settings.shape(layers).build()


def _be_one_of_many(settings: TrainSettings) -> None:
    """This process as a rank of torchrun's: what all ranks raise is told once on each machine."""
    try:
        _be_rank(settings)
    except RankError as error:
        if place_here().speaks_of(error):
            raise
        sys.exit(2)


def _be_rank(settings: TrainSettings) -> None:
    """This process as one rank; the launcher calls it in each process that it starts."""
    from rich.console import Console

    from fullbore.train.launch import StopRequest
    from fullbore.train.rank import run_rank

    with StopRequest() as should_stop:
        run_rank(settings, place_here(), console=Console(), should_stop=should_stop)
