"""An explanation of Megatron's flags as JSON (docs/json.md)."""

from __future__ import annotations

from fullbore.cli import plan_document
from fullbore.cli.explain_tables import bubble_shares
from fullbore.plan.explain import Beyond, Change, Edit, Explanation, Violation

__all__ = ["document"]

_OF_A_SEARCH = (
    "complete",
    "taken_from_model",
    "spreads",
    "spreads_pruned",
    "candidates",
    "simulated",
    "simulations",
    "too_large",
    "pruned",
    "plans",
    "neighbours",
    "front",
)


def document(made: Explanation) -> dict[str, object]:
    """Every figure, unrounded; the keys of a plan are those of `fullbore plan`."""
    notes, advice = made.notes, made.advice
    return {
        "legal": not made.violations,
        "runs": made.runs,
        "violations": [_violation(one) for one in made.violations],
        "not_priced": [_violation(one) for one in made.unpriced],
        "mended": None if made.mend is None else _edit(made.mend),
        **_figures(made),
        "best_change": None if advice is None or advice.best is None else _change(advice.best),
        "changes": [] if advice is None else [_change(one) for one in advice.changes],
        "changes_tried": 0 if advice is None else advice.tried,
        "changes_too_large": [] if advice is None else [_large(one) for one in advice.too_large],
        "beyond": None if made.beyond is None else _beyond(made.beyond),
        "ignored": list(notes.ignored),
        "assumed": list(notes.unpriced),
        "unknown": [{"flag": name, "perhaps": meant} for name, meant in notes.unknown],
        "not_looked_at": list(notes.unread),
    }


def _figures(made: Explanation) -> dict[str, object]:
    """The figures of the one plan that the flags are, and what was asked; none if it has none."""
    if made.findings is None:
        return {"plan": None}
    told = plan_document.document(made.findings)
    shares = bubble_shares(made.findings.idle)
    return {
        "fits": made.findings.winner.fits,
        "plan": plan_document.of_one(made.findings.winner, made.findings.figures[0]),
        "bubble_fraction": sum(shares.values()),
        "bubble_parts": {name.removesuffix("_s"): share for name, share in shares.items()},
        **{key: value for key, value in told.items() if key not in _OF_A_SEARCH},
    }


def _violation(one: Violation) -> dict[str, object]:
    return {
        "rule": one.broken.rule.strip("_"),
        "message": one.broken.message,
        "nearest": [_edit(edit) for edit in one.nearest],
    }


def _edit(edit: Edit) -> dict[str, object]:
    """flags: name, as typed without dashes in front: its words, null where it is left out."""
    return {
        "text": edit.text,
        "flags": {name: None if words is None else list(words) for name, words in edit.changes},
    }


def _beyond(one: Beyond) -> dict[str, object]:
    choice = one.evaluated.choice
    return {
        "schedule": choice.schedule,
        "virtual_stages": choice.virtual_stages,
        "stage_layers": list(choice.layers or ()),
        "step_s": one.evaluated.step_s,
        "peak_bytes": one.evaluated.peak_bytes,
        "gain": one.gain,
        "reason": one.reason,
        "engines": list(one.engines),
    }


def _large(one: Change) -> dict[str, object]:
    return {
        **_edit(one.edit),
        "peak_bytes": one.evaluated.peak_bytes,
        "worst_rank": one.evaluated.worst_rank,
    }


def _change(one: Change) -> dict[str, object]:
    return {
        **_edit(one.edit),
        "step_s": one.evaluated.step_s,
        "peak_bytes": one.evaluated.peak_bytes,
        "gain": one.gain,
        "reason": one.reason,
    }
