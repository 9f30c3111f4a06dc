"""An explanation of Megatron's flags as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import fill

from fullbore.cli.figures import counted, percent, seconds
from fullbore.cli.output import table
from fullbore.cli.plan_tables import (
    Cells,
    allowance_text,
    headline,
    idle_cells,
    layers_text,
    memory_cells,
    parts_cells,
    totals,
)
from fullbore.cost.hardware import GIB
from fullbore.plan.choice import Choice, recompute_name
from fullbore.plan.explain import Advice, Beyond, Change, Edit, Explanation, Notes, Violation
from fullbore.plan.findings import Findings
from fullbore.plan.parts import Idle
from fullbore.view.units import time_unit

__all__ = ["bubble_shares", "legal_text", "report"]

_WIDTH = 100
_LARGE = 4  # of what does not fit, as many are named
_IDLE = {
    "warmup_s": "warm-up",
    "steady_s": "between",
    "cooldown_s": "cool-down",
    "imbalance_s": "imbalance",
    "communication_s": "communication",
}


def report(made: Explanation) -> str:
    """Everything, for a terminal."""
    sections = [*_violations(made)]
    if made.findings is not None and made.advice is not None:
        sections += _figures(made.findings)
        sections.append(_advice(made.advice, made.findings))
        if made.beyond is not None:
            sections.append(_beyond(made.beyond))
    sections += _notes(made.notes)
    if made.findings is not None:
        sections.append(_conventions(made.findings))
    return "\n\n".join(sections)


def _violations(made: Explanation) -> Iterator[str]:
    if made.findings is not None:
        yield headline(made.findings.plan.question)
    number, lines = len(made.violations), ["legal: Megatron-LM refuses none of these flags"]
    if number:
        lines = [f"illegal: Megatron-LM refuses these flags for {counted(number, 'reason')}"]
    for place, violation in enumerate(made.violations, start=1):
        lines += _violation(place, violation)
    for violation in made.unpriced:
        lines.append(_filled("not priced here: ", violation.broken.message))
        lines.append(_filled("priced are: ", legal_text(violation.nearest) or "none found"))
    if made.mend is None:
        lines.append("no figures: nothing was found that mends all of it")
    elif made.mend.changes:
        lines.append(_filled("figures below are with ", made.mend.text))
    yield "\n".join(lines)


def _violation(place: int, violation: Violation) -> list[str]:
    told = legal_text(violation.nearest) or "nothing was found by changing one flag"
    return [
        _filled(f"{place:>2}  ", violation.broken.message),
        _filled("    legal: ", told),
    ]


def legal_text(edits: Sequence[Edit]) -> str:
    """Single changes, the values of one flag together: `--x 4 or 8; no --y`."""
    told: dict[str, str] = {}
    for edit in edits:
        name, words = edit.changes[0]
        if name in told and len(edit.changes) == 1 and words:
            told[name] += f" or {' '.join(words)}"
        else:
            told[name if words and name not in told else edit.text] = edit.text
    return "; ".join(told.values())


def _filled(title: str, text: str) -> str:
    return fill(
        text,
        width=_WIDTH,
        initial_indent=title,
        subsequent_indent=" " * len(title),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _figures(findings: Findings) -> Iterator[str]:
    choice = findings.winner.choice
    told = [("ranks", _ranks(choice)), ("schedule", _schedule(choice)), *totals(findings)[1:]]
    lines = [_filled(title.ljust(10), text) for title, text in told]
    lines.append(_filled("bubble".ljust(10), _bubble(findings.idle)))
    if not findings.winner.fits:
        over = findings.winner.peak_bytes - findings.plan.question.limit_bytes
        lines.append(
            f"it does not fit: rank {findings.winner.worst_rank} needs {over / GIB:.1f} GiB more"
        )
    yield "\n".join(lines)
    yield _titled("memory of each rank, GiB", memory_cells(findings))
    unit = time_unit(findings.winner.step_s).symbol
    yield _titled(f"idle time of each rank, {unit}", idle_cells(findings))
    yield _titled("where the step goes", parts_cells(findings))


def _ranks(choice: Choice) -> str:
    spread = choice.spread
    sizes = {"TP": spread.tensor, "CP": spread.context, "PP": spread.pipeline, "DP": spread.data}
    told = [
        " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"
    ]
    if spread.expert > 1:
        told.append(f"EP {spread.expert}, an expert on {spread.split.width_of_experts}")
    if spread.sequence_parallel:
        told.append("sequence parallel")
    if spread.distributed:
        told.append("distributed optimizer")
    return "; ".join(told)


def _schedule(choice: Choice) -> str:
    told = [choice.schedule]
    if choice.virtual_stages > 1:
        told.append(f"{choice.virtual_stages} stages a rank in groups of {choice.group}")
    told.append(f"microbatches of {choice.spread.microbatch_size}")
    return f"{', '.join(told)}; recompute {recompute_name(choice.recompute)}"


def _titled(title: str, cells: Cells) -> str:
    return f"{title}\n{table(*cells)}"


def bubble_shares(idle: Idle) -> dict[str, float]:
    """Idle time by its cause, as shares of all ranks' time in the pipeline."""
    parts = {name: float(getattr(idle, name).sum()) for name in _IDLE}
    whole = float(idle.busy_s.sum()) + sum(parts.values())
    return {name: round(idle_s / whole, 12) + 0.0 for name, idle_s in parts.items()}  # no -0.0


def _bubble(idle: Idle) -> str:
    shares = bubble_shares(idle)
    told = ", ".join(f"{_IDLE[name]} {percent(share)}" for name, share in shares.items())
    return f"{percent(sum(shares.values()))} of the ranks' time in the pipeline: {told}"


def _advice(advice: Advice, findings: Findings) -> str:
    title = "the one change that helps most"
    if not findings.winner.fits:
        title = "what makes it fit at the least cost"
    tried = f"{counted(advice.tried, 'legal change')} evaluated"
    large = _too_large(advice.too_large)
    if advice.best is None:
        least = "none makes it fit" if not findings.winner.fits else "none makes the step shorter"
        return "\n".join([title, f"{least} ({tried})", *large])
    told = [one for one in advice.changes if one.gain > 0 or not findings.winner.fits]
    width = max(len(one.edit.text) for one in told)
    lines = [_change(one, min(width, 72)) for one in told]
    return "\n".join([title, lines[0], f"next ({tried})", *lines[1:], *large])


def _too_large(changes: Sequence[Change]) -> Iterator[str]:
    """The smallest of what does not fit."""
    if changes:
        told = [
            f"{one.edit.text} ({one.evaluated.peak_bytes / GIB:.1f} GiB)"
            for one in changes[:_LARGE]
        ]
        more = f"; {len(changes) - _LARGE} more" if len(changes) > _LARGE else ""
        yield _filled("too large: ", "; ".join(told) + more)


def _change(one: Change, width: int) -> str:
    memory = f"{one.evaluated.peak_bytes / GIB:.1f} GiB"
    return (
        f"  {one.edit.text.ljust(width)}  {seconds(one.evaluated.step_s)}, {memory}; {one.reason}"
    )


def _beyond(one: Beyond) -> str:
    choice, memory = one.evaluated.choice, f"{one.evaluated.peak_bytes / GIB:.1f} GiB"
    v = f" with {choice.virtual_stages} stages a rank" if choice.virtual_stages > 1 else ""
    have = f"{' and '.join(one.engines)} can run so" if one.engines else "no engine here runs so"
    return "\n".join(
        [
            f"a schedule that Megatron-LM does not have, and {have}",
            f"  {choice.schedule}{v}, layers {layers_text(choice.layers)}: "
            f"{seconds(one.evaluated.step_s)}, {memory}; {one.reason}",
        ]
    )


def _notes(notes: Notes) -> Iterator[str]:
    for title, lines in (
        ("ignored by Megatron-LM", notes.ignored),
        ("assumed, or left out of the prediction", notes.unpriced),
        (
            "not known; perhaps another flag is meant",
            [f"{name}: {meant}?" for name, meant in notes.unknown],
        ),
    ):
        if lines:
            yield "\n".join([title, *(_filled("  ", line) for line in lines)])
    if notes.unread:
        yield "\n".join(["not looked at", _filled("  ", " ".join(notes.unread))])


def _conventions(findings: Findings) -> str:
    return allowance_text(findings.plan.question)
