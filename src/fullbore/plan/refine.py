"""Layers moved from stage to stage as long as a step gets faster by it.

A split whose slowest stage is as fast as possible is not always the fastest step: where stages are
uneven anyway, it matters which ones are, and what a rank has of several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fullbore.plan.evaluate import Evaluated, Evaluator

__all__ = ["refined"]

_GAIN = 1e-9  # less is rounding


def refined(
    evaluator: Evaluator, one: Evaluated, stop: Callable[[], bool] = lambda: False
) -> Evaluated:
    """A plan whose layers no single move makes faster, within the memory limit.

    stop: asked before each move; where it says so, the plan is the best so far.
    """
    while True:
        better = _step(evaluator, one, stop)
        if better is None:
            return one
        one = better


def _step(evaluator: Evaluator, one: Evaluated, stop: Callable[[], bool]) -> Evaluated | None:
    """The best of all moves of a layer; None where none is better."""
    best = None
    goal_s = one.step_s * (1 - _GAIN)
    assert one.choice.layers is not None
    for layers in _moves(one.choice.layers):
        if stop():
            break
        choice = replace(one.choice, layers=layers)
        if evaluator.bound_s(choice) >= goal_s:
            continue
        made = evaluator.evaluate(choice)
        if made.fits and made.step_s < goal_s:
            best, goal_s = made, made.step_s
    return best


def _moves(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    last = len(layers) - 1
    for source, number in enumerate(layers):
        if number <= (0 if source == last else 1):
            continue
        for target in range(len(layers)):
            if target != source:
                moved = list(layers)
                moved[source] -= 1
                moved[target] += 1
                yield tuple(moved)
