"""One rank of a training run: its stages, its optimizer, its data, and what a step does to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fullbore.errors import CheckpointError, DataError, ModelError, RankError
from fullbore.ir import Schedule
from fullbore.runtime import Pipeline, StepResult
from fullbore.timeline import Timeline, summarize
from fullbore.train import checkpoint as checkpoints
from fullbore.train.batches import Batches
from fullbore.train.build import build_stage, empty_model
from fullbore.train.optimizer import Optimizer, learning_rate, named_weights
from fullbore.train.peak import peak_flops
from fullbore.train.plan import Plan, make_plan
from fullbore.train.settings import TrainSettings
from fullbore.train.sources import find_model, read_tokenizer
from fullbore.train.stages import Stage, shared_weights
from fullbore.train.team import Team
from fullbore.train.text import Corpus, Tokens, tokenize
from fullbore.train.weight_files import WeightFiles

__all__ = ["StepReport", "Trainer", "token_loss"]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits [b, s, V] against token ids [b, s], in 32 bits."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one training step gave, the same on every rank.

    step: counted from 1. step_s: seconds of the whole step, optimizer included. mfu: model FLOPs
    against the ranks' peak together. bubble_fraction: measured; None where that means nothing,
    since ranks share cores. timeline and the bytes (see `StepResult`): with recording on.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    mfu: float
    bubble_fraction: float | None
    timeline: Timeline | None
    peak_activation_bytes: tuple[int, ...] | None
    stage_activation_bytes: tuple[int, ...] | None


class Trainer:
    """One rank of a run; every rank makes one and calls its methods in the same order."""

    def __init__(
        self,
        settings: TrainSettings,
        team: Team,
        *,
        device: torch.device,
        cores: int,
        schedule: Schedule | None = None,
        record: bool = True,
        on_stall: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Load everything that this rank needs.

        cores: of this machine, for this run. schedule: instead of the one that the settings
        name. record: measure each step's timeline. on_stall: is told who waits for whom, where
        nothing moves. Raises FullboreError, the same on every rank.
        """
        self.settings, self.team, self.device = settings, team, device
        self.oversubscribed = device.type == "cpu" and team.local_size > cores
        self._clock = clock
        self.step = self.sequences = 0
        self.plan = self._load_plan(schedule)
        self._dtype = torch.bfloat16 if settings.bf16 else torch.float32
        self._load_data()
        self.stages = team.together(self._build_stages, wrong=ModelError)
        self.pipe = Pipeline(
            stages=self.stages,
            schedule=self.plan.schedule,
            loss_fn=token_loss,
            device=device,
            tied=shared_weights(self.plan.anatomy, self.plan.parts),
            overlap_p2p=settings.overlap_p2p_communication,
            record=record,
            timeout_s=60 * settings.distributed_timeout_minutes,
            stall_timeout_s=settings.stall_timeout,
            on_stall=on_stall,
            flight_record=settings.flights,
        )
        self.optimizer = Optimizer(named_weights(list(self.stages.values())), settings)
        self.peak_flops = sum(team.gather(peak_flops(device, self._dtype, clock=clock)))
        torch.manual_seed(settings.seed + team.rank)  # last: dropout must not depend on the above

    # -- what a run does -----------------------------------------------------------------------

    def train_step(self) -> StepReport:
        """One step: M microbatches through the pipeline, clip, AdamW.

        Raises RankError where a rank fails or the loss is no number; weights are then those of
        the step before.
        """
        start_s = self._clock()
        batch = self.train_batches.at(self.sequences)
        lr = learning_rate(self.settings, self.step)
        result = self.pipe.step(batch.inputs.to(self.device), batch.targets.to(self.device))
        loss = self._check_loss(result)
        norm = self.pipe.clip_grad_norm(self.settings.clip_grad or math.inf)
        self.optimizer.step(lr=lr)
        self.step += 1
        self.sequences += len(batch.inputs)
        return self._report(result, loss, lr, norm, self._clock() - start_s)

    def evaluate(self) -> float | None:
        """Mean loss over the held-out batches; None where nothing is held out."""
        if self.held_out_batches is None:
            return None
        size = self.settings.micro_batch_size * self.settings.microbatches
        most = max(1, self.held_out_batches.sequences // size)
        losses = []
        for index in range(min(self.settings.eval_iters, most)):
            batch = self.held_out_batches.at(index * size)
            result = self.pipe.evaluate(batch.inputs.to(self.device), batch.targets.to(self.device))
            assert result.loss is not None
            losses.append(result.loss)
        return sum(losses) / len(losses)

    def save(self) -> Path:
        """Write a checkpoint of now; returns its folder. Raises CheckpointError on every rank."""
        progress = checkpoints.Progress(
            step=self.step,
            sequences=self.sequences,
            ranks=self.team.size,
            dtype=str(self._dtype).removeprefix("torch."),
        )
        with self._doing("writing the checkpoint"):
            return checkpoints.save(
                self._state(),
                progress,
                folder=self.settings.save,
                model_folder=self.plan.folder,
                team=self.team,
            )

    def resume(self, folder: Path) -> Path:
        """Go on from the newest checkpoint in a folder (or from that one), made at any P.

        Returns the checkpoint. Raises CheckpointError on every rank.
        """
        found = self.team.together(
            lambda: checkpoints.find_checkpoint(folder), wrong=CheckpointError
        )
        with self._doing("reading the checkpoint"):
            self.team.together(lambda: self._read(found), wrong=CheckpointError)
        return found

    def any(self, flag: bool) -> bool:  # noqa: FBT001 - one value, and the name says it
        """Whether the flag is up on any rank; every rank calls."""
        return self.pipe.total([float(flag)])[0] > 0

    def close(self) -> None:
        """Let go of the pipeline."""
        self.pipe.close()

    # -- loading -------------------------------------------------------------------------------

    def _load_plan(self, schedule: Schedule | None) -> Plan:
        settings = self.settings
        folder = self.team.leaders_first(
            lambda: find_model(
                settings.model, cache=settings.cache, needs_weights=not settings.from_scratch
            ),
            wrong=ModelError,
        )
        return self.team.together(
            lambda: make_plan(settings, folder, schedule=schedule), wrong=ModelError
        )

    def _load_data(self) -> None:
        settings, team = self.settings, self.team
        self.corpus = team.leaders_first(self._tokenize, wrong=DataError)
        size = settings.micro_batch_size * settings.microbatches

        def batches(
            what: str, tokens: Tokens, seed: int | None, least: int | None = None
        ) -> Batches:
            return Batches(
                tokens,
                seq_length=settings.seq_length,
                batch_size=size,
                seed=seed,
                what=what,
                least=least,
            )

        self.train_batches = team.together(
            lambda: batches("the training text", self.corpus.train, settings.seed), wrong=DataError
        )
        self.held_out_batches: Batches | None = None
        if settings.eval_interval is not None:
            self.held_out_batches = team.together(
                lambda: batches("the held-out text", self.corpus.held_out, None, least=1),
                wrong=DataError,
            )

    def _tokenize(self) -> Corpus:
        settings = self.settings
        tokenizer = read_tokenizer(self.plan.folder)
        vocabulary = self.plan.config.get_text_config().vocab_size
        if len(tokenizer) > vocabulary:
            raise ModelError(
                f"the tokenizer in {self.plan.folder} has {len(tokenizer)} tokens and the model's "
                f"vocabulary {vocabulary}: they do not belong together"
            )
        return tokenize(settings.data, tokenizer, cache=settings.cache, held_out=settings.held_out)

    def _build_stages(self) -> dict[int, Stage]:
        plan, settings = self.plan, self.settings
        weights = None
        if not settings.from_scratch:
            weights = WeightFiles(plan.folder, empty_model(plan.config))
        return {
            stage: build_stage(
                plan.config,
                plan.anatomy,
                plan.parts[stage],
                weights=weights,
                seed=settings.seed,
                dtype=self._dtype,
                device=self.device,
            ).train()
            for stage in plan.schedule.placement.stages_of(self.team.rank)
        }

    # -- state ---------------------------------------------------------------------------------

    def _state(self) -> dict[str, Tensor]:
        state = {**self.optimizer.state(), **self._random_state()}
        for stage in self.stages.values():
            state |= {f"model.{name}": value for name, value in stage.kept_buffers().items()}
        for name, copies in self._frozen().items():
            state[f"model.{name}"] = copies[0].detach()
        return state

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Name what is done between steps in the error of a rank that is lost meanwhile."""
        try:
            yield
        except RankError as error:
            if error.step is not None:
                raise
            raise RankError(**{**error.state(), "action": what, "step": self.step}) from error

    def _frozen(self) -> dict[str, list[nn.Parameter]]:
        """Weights that are not trained: a resumed run must not depend on where they came from."""
        return named_weights(list(self.stages.values()), trained=False)

    def _random_state(self) -> dict[str, Tensor]:
        """Where this rank's generators stand, for dropout."""
        state = {f"random.{self.team.rank}.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state[f"random.{self.team.rank}.cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _read(self, found: Path) -> None:
        progress = checkpoints.read_progress(found)
        state, random = self._state(), self._random_state()
        known = checkpoints.tensor_names(found)
        if progress.ranks == self.team.size and set(random) <= known:
            state |= random  # else another number of ranks, or another kind of device
        else:
            state = {name: value for name, value in state.items() if name not in random}
        checkpoints.read_state(state, checkpoint=found, group=self.team.group)
        self.optimizer.load_copies()
        for first, *others in self._frozen().values():
            for other in others:
                other.detach().copy_(first)
        torch.set_rng_state(random[f"random.{self.team.rank}.cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(random[f"random.{self.team.rank}.cuda"], self.device)
        self.step, self.sequences = progress.step, progress.sequences
        self.pipe.step_number = progress.step + 1

    # -- figures -------------------------------------------------------------------------------

    def _check_loss(self, result: StepResult) -> float:
        if result.loss is not None and math.isfinite(result.loss):
            return result.loss
        self.optimizer.drop_gradients()
        mine = [m for m, loss in enumerate(result.losses or ()) if not math.isfinite(float(loss))]
        bad = [m for found in self.team.gather(mine) for m in found]
        last = self.plan.schedule.stages - 1
        raise self.pipe.fail(
            rank=self.plan.schedule.placement.stage_to_rank[last],
            action=f"{last}F{bad[0]}" if bad else None,
            cause=(
                f"the loss of step {self.step + 1} is {result.loss} (microbatches "
                f"{', '.join(map(str, bad))}): the weights are still those of the step before; "
                "lower --lr, or look at the data"
            ),
        )

    def _report(
        self, result: StepResult, loss: float, lr: float, norm: float, step_s: float
    ) -> StepReport:
        settings = self.settings
        tokens = settings.micro_batch_size * settings.microbatches * settings.seq_length
        bubble = None
        if result.timeline is not None and not self.oversubscribed:
            bubble = summarize(result.timeline, self.plan.schedule).bubble_fraction
        flops = self.plan.costs.step_flops_per_token * tokens
        return StepReport(
            step=self.step,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            mfu=flops / step_s / self.peak_flops,
            bubble_fraction=bubble,
            timeline=result.timeline,
            peak_activation_bytes=result.peak_activation_bytes,
            stage_activation_bytes=result.stage_activation_bytes,
        )
