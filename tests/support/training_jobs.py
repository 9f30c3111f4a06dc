"""What the ranks of a training test do, and the same training without a pipeline."""

from __future__ import annotations

import math
import resource
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullbore.errors import FullboreError
from fullbore.passes import recompute_ahead, split_backward
from fullbore.train.batches import Batches
from fullbore.train.optimizer import learning_rate
from fullbore.train.place import mesh_of
from fullbore.train.settings import TrainSettings
from fullbore.train.sources import read_tokenizer
from fullbore.train.stages import token_loss
from fullbore.train.team import Team
from fullbore.train.text import tokenize
from fullbore.train.trainer import Trainer

CPU = torch.device("cpu")


def settings_for(folder: Path, **changes: Any) -> TrainSettings:
    """Settings over folder/model and folder/text.jsonl, with checkpoints in folder/run."""
    values = {
        "model": str(folder / "model"),
        "data": [str(folder / "text.jsonl")],
        "save": folder / "run",
        "data_cache_path": folder / "cache",
        "seq_length": 16,
        "lr": 3e-3,
        "min_lr": 1e-4,
        "lr_warmup_iters": 2,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "train_iters": 6,
        "global_batch_size": 4,
        "device": "cpu",
    }
    return TrainSettings.of({**values, **changes})


def make_trainer(settings: TrainSettings, rank: int, **options: Any) -> Trainer:
    """This rank's trainer, in a process that has joined the default group or is alone."""
    if settings.world_size == 1:
        team = Team()
    else:
        size, ranks = dist.get_world_size(), settings.pipeline_model_parallel_size
        replicas = settings.data_parallel_size
        mesh = mesh_of("cpu", ranks=ranks, replicas=replicas) if replicas > 1 else None
        team = Team(
            rank=rank,
            size=size,
            local_rank=rank,
            local_size=size,
            group=dist.group.WORLD,
            mesh=mesh,
        )
    return Trainer(settings, team, device=CPU, cores=2, record=False, **options)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """This rank's main weights and optimizer state, by global names."""
    return {name: value.clone() for name, value in trainer.optimizer.state().items()}


def merged(results: list[Any]) -> dict[str, torch.Tensor]:
    """All ranks' weights from `run_steps`; copies of one weight must be equal to the bit."""
    found: dict[str, torch.Tensor] = {}
    for _, _, weights in results:
        for name, weight in weights.items():
            assert name not in found or torch.equal(found[name], weight), name
            found[name] = weight
    return found


def run_steps(
    rank: int,
    settings: TrainSettings,
    *,
    steps: int,
    load: Path | None = None,
    save: bool = False,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of some steps, and what the weights are after them."""
    trainer = make_trainer(settings, rank)
    if load is not None:
        trainer.resume(load)
    losses, norms = _advance(trainer, steps)
    if save:
        trainer.save()
    trainer.close()
    return losses, norms, weights_of(trainer)


def _advance(trainer: Trainer, steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of so many steps, each of which is told of once."""
    reports = [report for _ in range(steps) for report in trainer.advance()]
    reports += trainer.settle()
    assert [report.step for report in reports] == [
        *range(trainer.step - steps + 1, trainer.step + 1)
    ]
    return [r.loss for r in reports], [r.grad_norm for r in reports]


def run_split(
    rank: int, settings: TrainSettings, variants: list[tuple[Any, ...]], *, steps: int
) -> list[Any]:
    """For each (delay, recompute, ahead), and offload behind them where anything leaves for the
    host: losses, norms, weights, and shares that go with I.

    delay None keeps backwards whole; ahead None places no recomputation.
    """
    found = []
    for delay, recompute, ahead, *leaves in variants:
        changes = {"recompute": recompute, "offload": leaves[0] if leaves else None}
        changed = TrainSettings.of({**settings.model_dump(), **changes})
        schedule = changed.shape().build()
        if delay is not None:
            schedule = split_backward(schedule, delay=delay)
        if ahead is not None:
            schedule = recompute_ahead(schedule, ahead=ahead)
        trainer = make_trainer(changed, rank, schedule=changed.placed(schedule))
        reports = [trainer.train_step() for _ in range(steps)]
        shares = [r.share_with_input for r in trainer.split_reports()]
        trainer.close()
        losses, norms = [r.loss for r in reports], [r.grad_norm for r in reports]
        found.append((losses, norms, weights_of(trainer), shares))
    return found


def evaluate(rank: int, settings: TrainSettings) -> tuple[float | None, list[bool]]:
    """A held-out loss, and whether the weights have gradients after it."""
    trainer = make_trainer(settings, rank)
    loss = trainer.evaluate()
    held = [p.grad is not None for stage in trainer.stages.values() for p in stage.parameters()]
    trainer.close()
    return loss, held


def fill_the_disk(rank: int, settings: TrainSettings) -> str:
    """A checkpoint, a step, and a checkpoint for which there is no room on rank 1."""
    trainer = make_trainer(settings, rank)
    trainer.train_step()
    trainer.save()
    trainer.train_step()
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    try:
        trainer.save()
    except FullboreError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        trainer.close()
    return "nothing was raised"


def refusal(rank: int, settings: TrainSettings) -> str:
    """What a rank says that cannot be a trainer."""
    try:
        make_trainer(settings, rank)
    except FullboreError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def poison(rank: int, settings: TrainSettings) -> tuple[str, bool]:
    """A loss that is no number: what is said, and whether the weights are untouched."""
    trainer = make_trainer(settings, rank)
    trainer.advance()
    trainer.settle()
    stage = next(iter(trainer.stages.values()))
    weight = next(iter(stage.parameters()))
    with torch.no_grad():
        weight[0] = math.nan
    before = weights_of(trainer)
    try:
        for _ in range(20):
            trainer.advance()
    except FullboreError as error:
        after = weights_of(trainer)
        same = all(torch.equal(after[n], before[n]) for n in after if "exp_avg" in n)
        return str(error), same
    return "nothing was raised", False


def loads(rank: int, many: list[TrainSettings], *, load: Path) -> list[dict[str, torch.Tensor]]:
    """For each settings what a trainer has read from a checkpoint."""
    found = []
    for settings in many:
        trainer = make_trainer(settings, rank)
        trainer.resume(load)
        found.append(weights_of(trainer))
        trainer.close()
    return found


class FrozenTrainer(Trainer):
    """A trainer whose embedding is not trained."""

    def _build_stages(self) -> Any:
        stages = super()._build_stages()
        for stage in stages.values():
            for name, weight in stage.named_parameters():
                weight.requires_grad_("embed" not in name)
        return stages


def frozen_run(settings: TrainSettings, *, steps: int, load: Path | None) -> dict[str, Any]:
    """Losses and all weights of a run with a frozen embedding."""
    trainer = FrozenTrainer(settings, Team(), device=CPU, cores=2, record=False)
    if load is not None:
        trainer.resume(load)
    losses = [trainer.train_step().loss for _ in range(steps)]
    trainer.save()
    trainer.close()
    weights = {
        n: p.detach().clone() for s in trainer.stages.values() for n, p in s.named_parameters()
    }
    return {"losses": losses, "weights": weights}


def train_plainly(settings: TrainSettings, *, steps: int) -> tuple[list[float], list[float]]:
    """The same training by transformers and torch alone, microbatch by microbatch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32).train()
    corpus = tokenize(
        settings.data,
        read_tokenizer(Path(settings.model)),
        cache=settings.cache,
        held_out=settings.held_out,
    )
    size = settings.micro_batch_size * settings.microbatches
    batches = Batches(
        corpus.train,
        seq_length=settings.seq_length,
        batch_size=size,
        seed=settings.seed,
        what="text",
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        betas=(settings.adam_beta1, settings.adam_beta2),
        weight_decay=settings.weight_decay,
    )
    losses, norms = [], []
    for step in range(steps):
        batch = batches.at(step * size)
        total = 0.0
        for ids, targets in zip(
            batch.inputs.split(settings.micro_batch_size),
            batch.targets.split(settings.micro_batch_size),
            strict=True,
        ):
            logits = model(input_ids=ids, use_cache=False).logits
            loss = token_loss(logits, targets) / settings.microbatches
            loss.backward()
            total += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def run_figures(
    rank: int, settings: TrainSettings, *, steps: int
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of some steps, of a model whose weights are many."""
    trainer = make_trainer(settings, rank)
    found = _advance(trainer, steps)
    trainer.close()
    return found


def run_several(rank: int, runs: list[tuple[TrainSettings, dict[str, Any]]]) -> list[Any]:
    """Several runs, one after the other, as `run_steps` does them."""
    return [run_steps(rank, settings, **options) for settings, options in runs]


def evaluate_several(rank: int, settings: list[TrainSettings]) -> list[float | None]:
    """Held-out losses."""
    return [evaluate(rank, one)[0] for one in settings]
