"""What engines keep of gradients, weights and the optimizer, and which optimizers they have.

A Megatron-LM script may name types that others do not have. A plan counts the bytes of those types,
so an engine that would train with others is refused rather than given a plan that is not its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullbore.cost.model import Precision
from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.plan.question import Question

__all__ = ["adam_in_32_bits", "adam_or_sgd_in_32_bits", "any_optimizer"]


def any_optimizer(title: str, question: Question) -> None:
    """Megatron-LM takes what its own script says."""


def adam_in_32_bits(title: str, question: Question) -> None:
    """Adam alone, and everything beside the weights in 32 bits."""
    _check_name(title, question, ("adam",))
    _check_states(title, question)
    if question.precision.gradient != _usual(question).gradient:
        raise _refused(title, question, "sums gradients in the type that it has without the script")


def adam_or_sgd_in_32_bits(title: str, question: Question) -> None:
    """Gradients in the type of the weights too."""
    _check_name(title, question, ("adam", "sgd"))
    _check_states(title, question)


def _check_name(title: str, question: Question, known: tuple[str, ...]) -> None:
    if question.optimizer not in known:
        raise ConfigError(
            f"--optimizer {question.optimizer}: {title} has {' and '.join(known)} here; write "
            "another into the script, or plan without launch files for it"
        )


def _check_states(title: str, question: Question) -> None:
    precision, usual = question.precision, _usual(question)
    moments = usual.moments / (2 if question.optimizer == "sgd" else 1)
    if (precision.main_weight, precision.moments) != (usual.main_weight, moments):
        raise _refused(title, question, "keeps main weights and moments in 32 bits")


def _usual(question: Question) -> Precision:
    return Precision.named(question.precision.name)


def _refused(title: str, question: Question, what: str) -> ConfigError:
    told = [flag for flag in question.borrowed.optimizer if not flag.startswith("--optimizer")]
    return ConfigError(
        f"{' '.join(told) or 'these types of gradients and states'}: {title} {what}; leave it out "
        "of the script, or plan with --emit megatron"
    )
