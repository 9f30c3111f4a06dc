"""A small model on a small cluster, so that whole plans take fractions of a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fullbore.cost.hardware import Cluster
from fullbore.cost.model.hugging_face import shape_of
from fullbore.plan import Choice, Evaluator, Fixed, Question
from fullbore.plan.emit import Job
from fullbore.plan.space import spreads
from fullbore.schedules import eager_1f1b

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def ask(
    *, cluster: str = "h100:1x4", config: dict[str, Any] | None = None, **more: Any
) -> Question:
    """A question, such as `ask(pipeline=(4,), memory_limit_bytes=8e9)`: fixed flags by name."""
    own = {"global_batch": 16, "sequence": 1024}
    fixed = {key: more.pop(key) for key in list(more) if key in Fixed.__slots__}
    return Question(
        shape=shape_of({**LLAMA, **(config or {})}),
        cluster=Cluster.parse(cluster),
        fixed=Fixed(**fixed),
        **{**own, **more},
    )


def chosen(
    *,
    cluster: str = "h100:1x4",
    tensor: int = 1,
    config: dict[str, Any] | None = None,
    asked: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[Question, Evaluator, Choice]:
    """A choice on P=2 stages, two sequences a microbatch; more: of the choice.

    asked: of the question.
    """
    question = ask(
        pipeline=(2,),
        tensor=(tensor,),
        microbatch_size=(2,),
        cluster=cluster,
        config=config,
        **(asked or {}),
    )
    (spread,) = spreads(question)
    evaluator = Evaluator(question)
    choice = Choice(spread=spread, **{"schedule": "1f1b", "virtual_stages": 1, **more})
    return question, evaluator, evaluator.with_layers(choice)


def job(*, model: str | None = "models/small", from_scratch: bool = True, **more: Any) -> Job:
    """What launch files are made from; more: as of `chosen`."""
    question, evaluator, choice = chosen(**more)
    return Job(
        question=question,
        choice=choice,
        schedule=evaluator.programs.of(choice).schedule,
        step_s=0.9,
        head=("Written by a test.", "Predicted: 900 ms a step, 40.0 % MFU."),
        model=model,
        from_scratch=from_scratch,
        folder="launch",
    )


def found_job(**more: Any) -> Job:
    """The same with a schedule that has no name here: eager 1F1B, as a search could find it."""
    plain = job(**more)
    ranks, microbatches = plain.choice.spread.pipeline, plain.choice.spread.microbatches
    return replace(
        plain,
        choice=replace(plain.choice, schedule="found-1"),
        schedule=eager_1f1b(ranks=ranks, microbatches=microbatches),
    )
