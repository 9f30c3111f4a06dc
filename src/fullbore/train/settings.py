"""What a training run is: every flag and configuration key, with Megatron's names and checks.

One frozen model holds them all, so that command line, configuration file and checkpoint speak of
the same run. Arithmetic that needs no model is checked here, before anything is loaded or
launched. No torch is needed.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fullbore.errors import ConfigError
from fullbore.ir import Schedule
from fullbore.megatron import (
    PipelineShape,
    choose_schedule,
    count_microbatches,
    count_virtual_stages,
    split_layers,
)
from fullbore.passes import offload
from fullbore.schedules import FAMILIES
from fullbore.train.schedule_file import SAID_BY_FILES, is_schedule_file, read_schedule_file
from fullbore.train.sliced import check_sliced

__all__ = ["TrainSettings", "flag", "read_config"]


class TrainSettings(BaseModel):
    """A training run; `TrainSettings.of` makes one and tells errors as ours.

    Sizes of batches count sequences, seq_length tokens, intervals steps; clip_grad 0 means no
    clipping. stage_layers: layers of each stage by hand, in the model's order. threads: compute
    threads of a rank; None shares the cores out. use_distributed_optimizer: each of the D replicas
    keeps the optimizer's state of a D-th of the weights. optimizer_barrier: whether all ranks wait
    for the global norm before they step; without it steps are validated late. stall_timeout:
    seconds without any movement until it is told who waits for whom; distributed_timeout_minutes:
    until a wait is given up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str
    from_scratch: bool = False
    data: tuple[str, ...] = Field(min_length=1)
    held_out: float = Field(default=0.02, ge=0, lt=1)
    seq_length: int = Field(default=512, ge=2)

    pipeline_model_parallel_size: int = 1
    data_parallel_size: int = 1
    use_distributed_optimizer: bool = False
    optimizer_barrier: bool = True
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    stage_layers: tuple[int, ...] | None = None
    schedule: str | None = None
    slices: int | None = Field(default=None, ge=1)
    overlap_p2p_communication: bool = True
    recompute: Literal["none", "full", "placed"] | Annotated[int, Field(ge=0)] | None = None
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = Field(default=None, ge=1)
    offload: int | None = Field(default=None, ge=1)
    offload_ahead: int | None = Field(default=None, ge=0)

    micro_batch_size: int = 1
    global_batch_size: int | None = 8
    train_iters: int = Field(default=100, ge=1)
    lr: float = Field(default=1e-4, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    lr_warmup_iters: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    clip_grad: float = Field(default=1.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    seed: int = Field(default=1234, ge=0)
    bf16: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    stall_timeout: float = Field(default=60.0, gt=0, le=24 * 24 * 3600)
    distributed_timeout_minutes: float = Field(default=30.0, gt=0, le=24 * 24 * 60)  # 24 days

    save: Path = Path("runs/train")
    load: Path | None = None
    save_interval: int | None = Field(default=None, ge=1)
    export: Path | None = None
    data_cache_path: Path | None = None
    tensorboard_dir: Path | None = None
    log_interval: int = Field(default=1, ge=1)
    eval_interval: int | None = Field(default=None, ge=1)
    eval_iters: int = Field(default=4, ge=1)

    @field_validator("stage_layers", mode="before")
    @classmethod
    def _split_numbers(cls, value: Any) -> Any:
        """ "8,8,7,7" as on the command line."""
        return value.split(",") if isinstance(value, str) else value

    @field_validator("recompute", mode="before")
    @classmethod
    def _count_blocks(cls, value: Any) -> Any:
        """ "2" as on the command line."""
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator("data", mode="before")
    @classmethod
    def _one_is_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @classmethod
    def of(cls, values: Mapping[str, Any], *, where: str = "settings") -> Self:
        """Check settings by name; ConfigError names every wrong key and number."""
        named = {key.replace("-", "_"): value for key, value in values.items()}
        try:
            settings = cls.model_validate(named)
        except ValidationError as error:
            raise ConfigError(_explain(error, where)) from None
        settings._check()
        return settings

    @property
    def cache(self) -> Path:
        """Where converted models and tokenized text are kept."""
        return self.data_cache_path or self.save / "cache"

    @property
    def flights(self) -> Path:
        """Where each rank leaves what it was doing when a step failed."""
        return self.save / "flight"

    @property
    def recomputation(self) -> Literal["none", "full", "placed"] | int:
        """What is recomputed: see docs/split.md; unsaid, what has an R in the schedule."""
        if self.recompute is not None:
            return self.recompute
        if self.recompute_granularity is None:
            return "placed"
        if self.recompute_method == "block" and self.recompute_num_layers is not None:
            return self.recompute_num_layers
        return "full"

    def placed(self, schedule: Schedule) -> Schedule:
        """A schedule with the copies to the host that are asked for; see docs/offload.md."""
        if self.offload is None:
            return schedule
        ahead = 1 if self.offload_ahead is None else self.offload_ahead
        return offload(schedule, away=self.offload, ahead=ahead)

    def shape(self, layers: int | None = None) -> PipelineShape:
        """The pipeline that is asked for; layers: those of the model, where they are known (layers
        of a virtual stage cannot be counted without).

        `PipelineShape.layers` is None where stages are to be balanced by cost. Raises ConfigError
        naming the nearest legal values.
        """
        ranks = self.pipeline_model_parallel_size
        if ranks < 1:
            raise ConfigError(f"--pipeline-model-parallel-size is {ranks}: the nearest legal is 1")
        if is_schedule_file(self.schedule):
            return self._shape_of_file(self.schedule, layers)
        virtual_stages = self._virtual_stages(layers)
        return choose_schedule(
            name=self.schedule,
            ranks=ranks,
            virtual_stages=virtual_stages,
            microbatches=self.microbatches,
            group_size=self.microbatch_group_size_per_virtual_pipeline_stage,
            slices=self.slices,
            layers=None if layers is None else self._layers_by_hand(layers, virtual_stages),
        )

    def _shape_of_file(self, path: str, layers: int | None) -> PipelineShape:
        made = read_schedule_file(
            path,
            ranks=self.pipeline_model_parallel_size,
            microbatches=self.microbatches,
            typed={flag(name): getattr(self, name) for name in SAID_BY_FILES},
        )
        return PipelineShape(
            schedule=made.name,
            ranks=made.ranks,
            virtual_stages=made.virtual_stages,
            microbatches=made.microbatches // made.slices,
            layers=None if layers is None else self._layers_by_hand(layers, made.virtual_stages),
            made=made,
        )

    @property
    def microbatches(self) -> int:
        """M, of one replica."""
        return count_microbatches(
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            data_parallel_size=self.data_parallel_size,
        )

    @property
    def replica_batch_size(self) -> int:
        """Sequences that one replica has in a step."""
        return self.micro_batch_size * self.microbatches

    @property
    def step_sequences(self) -> int:
        """Sequences that all replicas have in a step together."""
        return self.replica_batch_size * self.data_parallel_size

    @property
    def world_size(self) -> int:
        """D x P, the ranks of the run."""
        return self.data_parallel_size * self.pipeline_model_parallel_size

    def _virtual_stages(self, layers: int | None) -> int:
        ranks = self.pipeline_model_parallel_size
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        chunks = self.num_virtual_stages_per_pipeline_rank
        if self.stage_layers is not None and per_chunk is None and chunks is None:
            return self._virtual_stages_by_hand(self.stage_layers)
        counted = count_virtual_stages(
            ranks=ranks, layers=layers, layers_per_stage=per_chunk, virtual_stages=chunks
        )
        family = next((family for family in FAMILIES if family.name == self.schedule), None)
        if per_chunk is None and chunks is None and family is not None:
            return family.default_virtual_stages
        return counted

    def _virtual_stages_by_hand(self, stage_layers: tuple[int, ...]) -> int:
        ranks = self.pipeline_model_parallel_size
        if len(stage_layers) % ranks:
            whole = len(stage_layers) // ranks * ranks
            legal = f"{whole} or {whole + ranks}" if whole else f"{ranks}"
            raise ConfigError(
                f"--stage-layers gives {len(stage_layers)} stages, no multiple of P={ranks}: the "
                f"nearest legal numbers of stages are {legal}"
            )
        return len(stage_layers) // ranks

    def _layers_by_hand(self, layers: int, virtual_stages: int) -> tuple[int, ...] | None:
        """Layers of each stage where flags say them, None where cost decides."""
        ranks = self.pipeline_model_parallel_size
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        if self.stage_layers is not None:
            return self._check_stage_layers(self.stage_layers, layers, ranks * virtual_stages)
        if first is not None or last is not None or per_chunk is not None:
            return split_layers(
                layers=layers, ranks=ranks, virtual_stages=virtual_stages, first=first, last=last
            )
        if ranks * virtual_stages > layers + 1:
            raise ConfigError(
                f"P={ranks} x v={virtual_stages} are {ranks * virtual_stages} stages, and the "
                f"model has {layers} layers and a head: the nearest legal values are "
                f"P={min(ranks, layers + 1)} with v={max(1, (layers + 1) // ranks)}"
            )
        return None

    def _check_stage_layers(
        self, stage_layers: tuple[int, ...], layers: int, stages: int
    ) -> tuple[int, ...]:
        told = ",".join(map(str, stage_layers))
        if len(stage_layers) != stages:
            raise ConfigError(f"--stage-layers {told} gives {len(stage_layers)} stages of {stages}")
        if min(stage_layers[1:-1], default=1) < 1 or min(stage_layers) < 0:
            raise ConfigError(f"--stage-layers {told} leaves a stage empty: give each a layer")
        if sum(stage_layers) != layers:
            raise ConfigError(
                f"--stage-layers {told} are {sum(stage_layers)} layers and the model has {layers}: "
                f"change them by {layers - sum(stage_layers):+d}"
            )
        return stage_layers

    def _check(self) -> None:
        if self.lr_warmup_iters >= self.train_iters:
            raise ConfigError(
                f"--lr-warmup-iters {self.lr_warmup_iters} leaves no step after the warm-up: the "
                f"nearest legal value is {self.train_iters - 1} (--train-iters {self.train_iters})"
            )
        if self.min_lr > self.lr:
            raise ConfigError(f"--min-lr {self.min_lr} is above --lr {self.lr}: lower it")
        if self.eval_interval is not None and self.held_out == 0:
            raise ConfigError("--eval-interval needs held-out text: give --held-out, such as 0.02")
        if self.stage_layers is not None and (
            self.decoder_first_pipeline_num_layers is not None
            or self.decoder_last_pipeline_num_layers is not None
        ):
            raise ConfigError(
                "--stage-layers says every stage, so leave out --decoder-first-pipeline-num-layers "
                "and --decoder-last-pipeline-num-layers"
            )
        self._check_recompute()
        self._check_schedule()
        if self.num_layers_per_virtual_pipeline_stage is None:
            check_sliced(self, self.shape().build().slices)
        elif self.microbatches < 1 or self.num_virtual_stages_per_pipeline_rank is not None:
            self.shape()  # its own words for what is wrong; the rest waits for the model's layers

    def _check_schedule(self) -> None:
        runnable = [family.name for family in FAMILIES if family.runs]
        known = {family.name for family in FAMILIES}
        if self.schedule in known.difference(runnable):
            raise ConfigError(
                f"--schedule {self.schedule} can be simulated, and not be run: "
                f"fullbore simulate it, or choose {' or '.join(runnable)}"
            )

    def _check_recompute(self) -> None:
        granularity, method = self.recompute_granularity, self.recompute_method
        if granularity == "selective":
            raise ConfigError(
                "--recompute-granularity selective has nothing to do here: attention as PyTorch "
                "computes it keeps no scores; the nearest legal value is full"
            )
        if self.recompute is not None and granularity is not None:
            raise ConfigError(
                "--recompute and --recompute-granularity say the same twice: give one of them"
            )
        if granularity is None and (method or self.recompute_num_layers) is not None:
            raise ConfigError(
                "--recompute-method and --recompute-num-layers need --recompute-granularity full; "
                "or give --recompute with a number of blocks a stage"
            )
        if method == "block" and self.recompute_num_layers is None:
            raise ConfigError("--recompute-method block needs --recompute-num-layers")
        if self.offload is not None and self.recomputation == "full":
            raise ConfigError(
                "--offload has nothing to send to the host where --recompute full keeps nothing: "
                "give up one of them, or --recompute a number of blocks a stage"
            )
        if self.offload is None and self.offload_ahead is not None:
            raise ConfigError("--offload-ahead says when what --offload sends away comes back")


def read_config(path: str | PathLike[str]) -> dict[str, Any]:
    """Settings from a YAML (.yaml, .yml), TOML or JSON file; ConfigError where it is none."""
    path = Path(path)
    kinds: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".json": json.loads,
        ".yaml": _yaml,
        ".yml": _yaml,
    }
    if path.suffix not in kinds:
        raise ConfigError(f"{path}: a configuration file ends in {', '.join(kinds)}")
    try:
        values = kinds[path.suffix](path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path}: a configuration is a table of names and values")
    named = {key.replace("-", "_"): value for key, value in values.items()}
    if len(named) < len(values):
        twice = next(key for key in values if "-" in key and key.replace("-", "_") in values)
        raise ConfigError(f"{path}: {twice} and {twice.replace('-', '_')} are the same: keep one")
    return named


def flag(name: str) -> str:
    """The command line's flag for a setting, such as --micro-batch-size."""
    return "--" + name.replace("_", "-")


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _explain(error: ValidationError, where: str) -> str:
    return "\n".join(
        f"{where}: {_finding(found['type'], found['msg'], found['loc'], found.get('input'))}"
        for found in error.errors()
    )


def _finding(kind: str, message: str, location: tuple[int | str, ...], given: Any) -> str:
    name = str(location[0]) if location else ""
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(name, TrainSettings.model_fields, n=3)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"unknown key {name}{meant}"
    if kind == "missing":
        return f"{flag(name)} is missing"
    return f"{flag(name)} {given!r}: {message[:1].lower()}{message[1:]}"
