"""One rank of a training run: its stages, its optimizer, its data, and what a step does to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from fullbore.errors import CheckpointError, DataError, FullboreError, ModelError, RankError
from fullbore.ir import Schedule
from fullbore.runtime import Pipeline, SplitReport, StepResult
from fullbore.timeline import summarize
from fullbore.train import checkpoint as checkpoints
from fullbore.train.batches import Batch, Batches
from fullbore.train.build import build_stage, empty_model
from fullbore.train.course import course_of
from fullbore.train.late import Certain, LateSteps
from fullbore.train.optimizer import Optimizer, Shares, learning_rate, named_weights
from fullbore.train.peak import peak_flops
from fullbore.train.plan import Plan, make_plan
from fullbore.train.sanity import check_loss, check_norm
from fullbore.train.settings import TrainSettings
from fullbore.train.sources import find_model, read_tokenizer
from fullbore.train.stages import Stage, shared_weights, token_loss
from fullbore.train.step_report import StepReport
from fullbore.train.team import Team
from fullbore.train.text import Corpus, Tokens, tokenize
from fullbore.train.weight_files import WeightFiles

__all__ = ["Trainer"]


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
        self.step = self.sequences = self.steps_here = 0
        self.resumed_from: checkpoints.Progress | None = None
        self.plan = self._load_plan(schedule)
        self._dtype = torch.bfloat16 if settings.bf16 else torch.float32
        self._load_data()
        self.stages = team.together(self._build_stages, wrong=ModelError)
        self.pipe = Pipeline(
            stages=self.stages,
            schedule=self.plan.schedule,
            loss_fn=token_loss,
            mesh=team.mesh,
            device=device,
            tied=shared_weights(self.plan.anatomy, self.plan.parts),
            overlap_p2p=settings.overlap_p2p_communication,
            record=record and settings.optimizer_barrier,
            main_grad_dtype=torch.float32 if settings.bf16 else None,
            recompute=settings.recomputation,
            timeout_s=60 * settings.distributed_timeout_minutes,
            stall_timeout_s=settings.stall_timeout,
            on_stall=on_stall,
            flight_record=settings.flights,
        )
        shares = None
        if settings.use_distributed_optimizer and team.replicas > 1:
            shares = Shares(replica=team.replica, replicas=team.replicas, spread=self.pipe.spread)
        self.optimizer = Optimizer(
            named_weights(list(self.stages.values())), settings, shares=shares
        )
        self._late = None if settings.optimizer_barrier else self._late_steps()
        self._stop, self._certain_steps = False, 0
        self.peak_flops = sum(team.gather(peak_flops(device, self._dtype, clock=clock)))
        torch.manual_seed(settings.seed + team.rank)  # last: dropout must not depend on the above

    # -- what a run does -----------------------------------------------------------------------

    def advance(self) -> list[StepReport]:
        """One more step; the reports of those that have become certain: this one, or without
        the optimizer's barrier mostly the one before. Raises as `train_step`.
        """
        if self._late is None:
            return [self.train_step()]
        batch = self._batch_at(self.train_batches, self.sequences)
        lr = learning_rate(self.settings, self.step)
        inputs, targets = batch.inputs.to(self.device), batch.targets.to(self.device)
        certain = self._late.step(inputs, targets, lr=lr, stop=self._stop)
        self.step += 1
        self.steps_here += 1
        self.sequences += self.settings.step_sequences
        return self._late_reports(certain)

    def settle(self) -> list[StepReport]:
        """Wait until every step is certain, as before weights are read; their reports."""
        return [] if self._late is None else self._late_reports(self._late.finish())

    def is_asked_to_stop(self, stop: bool) -> bool:  # noqa: FBT001
        """Whether any rank is; stop: whether this one is. Without the optimizer's barrier the
        others hear of it with the steps that become certain.
        """
        if self._late is None:
            return self.pipe.total([float(stop)])[0] > 0
        self._stop = stop
        return self._late.stop_asked

    def train_step(self) -> StepReport:
        """One step with a barrier: M microbatches through the pipeline, clip, AdamW.

        Raises RankError where a rank fails or the loss is no number, PipelineError where the
        gradient's norm is none; weights are then those of the step before.
        """
        start_s = self._clock()
        batch = self._batch_at(self.train_batches, self.sequences)
        lr = learning_rate(self.settings, self.step)
        result = self.pipe.step(batch.inputs.to(self.device), batch.targets.to(self.device))
        loss = self._check_loss(result.loss, result.losses or ())
        norm = self.pipe.clip_grad_norm(self.settings.clip_grad or math.inf)
        self._check_norm(norm)
        self.optimizer.step(lr=lr)
        self.step += 1
        self.steps_here += 1
        self.sequences += self.settings.step_sequences
        self._certain_steps = self.step
        figures = Certain(loss=loss, grad_norm=norm, lr=lr, step_s=self._clock() - start_s)
        return self._report(figures, result, step=self.step)

    def evaluate(self) -> float | None:
        """Mean loss over the held-out batches; None where nothing is held out."""
        if self.held_out_batches is None:
            return None
        size = self.settings.step_sequences
        most = max(1, self.held_out_batches.sequences // size)
        losses = []
        for index in range(min(self.settings.eval_iters, most)):
            batch = self._batch_at(self.held_out_batches, index * size)
            result = self.pipe.evaluate(batch.inputs.to(self.device), batch.targets.to(self.device))
            assert result.loss is not None
            losses.append(result.loss)
        return sum(losses) / len(losses)

    def split_reports(self) -> tuple[SplitReport, ...]:
        """Of all stages whose backward is split: what waits for W, known after two steps."""
        gathered = self.team.gather(self.pipe.split_report())
        return tuple(sorted((r for of_rank in gathered for r in of_rank), key=lambda r: r.stage))

    def save(self) -> Path:
        """Write a checkpoint of now; returns its folder. Raises CheckpointError on every rank."""
        progress = checkpoints.Progress(
            step=self.step,
            sequences=self.sequences,
            ranks=self.team.size,
            replicas=self.team.replicas,
            dtype=str(self._dtype).removeprefix("torch."),
            course=course_of(self.settings),
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

        def batches(what: str, tokens: Tokens, seed: int | None, least: int) -> Batches:
            return Batches(
                tokens,
                seq_length=settings.seq_length,
                batch_size=settings.replica_batch_size,
                seed=seed,
                what=what,
                least=least,
            )

        self.train_batches = team.together(
            lambda: batches(
                "the training text", self.corpus.train, settings.seed, settings.step_sequences
            ),
            wrong=DataError,
        )
        self.held_out_batches: Batches | None = None
        if settings.eval_interval is not None:
            self.held_out_batches = team.together(
                lambda: batches("the held-out text", self.corpus.held_out, None, 1),
                wrong=DataError,
            )

    def _late_steps(self) -> LateSteps:
        clip = self.settings.clip_grad
        return LateSteps(
            self.pipe, self.optimizer, clip_grad=clip, check=self._check, clock=self._clock
        )

    def _batch_at(self, batches: Batches, position: int) -> Batch:
        """This replica's rows of the step that begins at a position: the replicas' rows follow
        one another, so the step is the same at any number of replicas.
        """
        return batches.at(position + self.team.replica * self.settings.replica_batch_size)

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
            for stage in plan.schedule.placement.stages_of(self.team.pipeline_rank)
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
        self.resumed_from = progress = checkpoints.read_progress(found)
        state, random = self._state(), self._random_state()
        known = checkpoints.tensor_names(found)
        alike = (progress.ranks, progress.replicas) == (self.team.size, self.team.replicas)
        if alike and set(random) <= known:
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
        self._certain_steps = self.step
        self.pipe.step_number = progress.step + 1

    # -- figures -------------------------------------------------------------------------------

    def _check(self, loss: float | None, losses: Sequence[Tensor], norm: float) -> None:
        """Of the step that has just become certain."""
        self._check_loss(loss, losses)
        self._check_norm(norm)
        self._certain_steps += 1

    def _check_loss(self, loss: float | None, losses: Sequence[Tensor]) -> float:
        with self._dropping_gradients():
            return check_loss(
                loss,
                losses,
                step=self._certain_steps + 1,
                last_stage=self.plan.schedule.stages - 1,
                pipe=self.pipe,
                team=self.team,
            )

    def _check_norm(self, norm: float) -> None:
        with self._dropping_gradients():
            check_norm(norm, step=self._certain_steps + 1)

    @contextmanager
    def _dropping_gradients(self) -> Iterator[None]:
        try:
            yield
        except FullboreError:
            self.optimizer.drop_gradients()
            raise

    def _late_reports(self, certain: Sequence[Certain]) -> list[StepReport]:
        """Of the last steps that have become certain; nothing of them was recorded."""
        first = self._certain_steps - len(certain) + 1
        return [
            self._report(
                one,
                StepResult(loss=one.loss, losses=None, outputs=None, step_s=one.step_s),
                step=step,
            )
            for step, one in enumerate(certain, start=first)
        ]

    def _report(self, figures: Certain, result: StepResult, step: int) -> StepReport:
        settings = self.settings
        tokens = settings.step_sequences * settings.seq_length
        bubble = None
        if result.timeline is not None and not self.oversubscribed:
            bubble = summarize(result.timeline, self.plan.schedule).bubble_fraction
        flops = self.plan.costs.step_flops_per_token * tokens
        return StepReport(
            step=step,
            loss=figures.loss,
            lr=figures.lr,
            grad_norm=figures.grad_norm,
            step_s=figures.step_s,
            tokens_per_s=tokens / figures.step_s,
            mfu=flops / figures.step_s / self.peak_flops,
            bubble_fraction=bubble,
            timeline=result.timeline,
            peak_activation_bytes=result.peak_activation_bytes,
            stage_activation_bytes=result.stage_activation_bytes,
            stage_held_bytes=result.stage_held_bytes,
            stage_input_bytes=result.stage_input_bytes,
            stage_offload_bytes=result.stage_offload_bytes,
        )
