"""What became of a trial, in a few words: right, wrong by how much, an error, a hang."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from bench import GROUP_TIMEOUT_S, Outcome
from torch.distributed.constants import default_pg_timeout

Gradients = Mapping[str, torch.Tensor | None]

TOLERANCE = 1e-5  # relative, of the largest entry of a gradient
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe", "Pair is closed")
_LONGEST = 130  # characters of an error's first line; beyond, its first sentence must do


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was tried, under which schedule if that matters, and what came of it."""

    tried: str = ""
    under: str = ""
    words: str

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.tried, self.under) if part)
        return f"{where}: {self.words}" if where else self.words


def together(rows: list[Row]) -> list[Row]:
    """Rows that say the same of the same thing, as one that names all their schedules."""
    schedules: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        schedules.setdefault((row.tried, row.words), []).append(row.under)
    return [
        Row(tried=tried, under=", ".join(filter(None, names)), words=words)
        for (tried, words), names in schedules.items()
    ]


def judge(outcomes: list[Outcome]) -> str:
    """Words on a trial whose ranks gave (found, expected) gradients, keyed "stage.parameter"."""
    if failure := failure_of(outcomes):
        return failure
    found: dict[str, torch.Tensor | None] = {}
    expected: dict[str, torch.Tensor | None] = {}
    for outcome in outcomes:
        found |= outcome.value[0]
        expected |= outcome.value[1]
    return difference(found, expected)


def difference(found: Gradients, expected: Gradients) -> str:
    """How far found is from expected, names being those found."""
    pairs = {name: (found[name], expected[name]) for name in sorted(found)}
    missing = [n for n, (a, b) in pairs.items() if a is None and b is not None]
    extra = [n for n, (a, b) in pairs.items() if a is not None and b is None]
    both = {n: (a, b) for n, (a, b) in pairs.items() if a is not None and b is not None}
    off = {n: (a, b) for n, (a, b) in both.items() if distance(a, b) > TOLERANCE}
    parts = []
    if missing:
        parts.append(f"no gradient for {_named(missing, pairs)}")
    if extra:
        zero = all(not bool(found[name].any()) for name in extra)  # type: ignore[union-attr]
        what = "zeros" if zero else "a gradient"
        parts.append(f"{what} where one process has None, {_named(extra, pairs)}")
    if off:
        parts.append(f"{how_far(list(off.values()))}{_where(list(off), list(both))}")
    return "wrong: " + "; ".join(parts) if parts else "right"


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry expected; infinite if it is no number."""
    if found.shape != expected.shape:
        return float("inf")
    off = float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
    return off if off == off else float("inf")


def how_far(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
    """The factor between found and expected if there is one, or the largest distance."""
    found = torch.cat([a.flatten() for a, _ in pairs])
    expected = torch.cat([b.flatten() for _, b in pairs])
    factor = float((found * expected).sum() / (expected * expected).sum())
    if all(distance(a, factor * b) < 1e-4 for a, b in pairs) and factor != 0:
        return f"{factor:.3g} × the gradient of one process"
    worst = max(distance(a, b) for a, b in pairs)
    if worst == float("inf"):
        return "not a number"
    return f"off by {100 * worst:.3g} % of the largest entry"


def failure_of(outcomes: list[Outcome]) -> str | None:
    """Words on the first ranks that failed of themselves; None if none failed."""
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.failed}
    if not failed:
        return None
    own = {rank: one for rank, one in failed.items() if not _follows(one)}
    origin = own or {rank: one for rank, one in failed.items() if not one.hung} or failed
    rows = [Row(under=str(rank), words=failed_words(one)) for rank, one in origin.items()]
    return "; ".join(_said_by(row, len(outcomes)) for row in together(rows))


def failed_words(outcome: Outcome) -> str:
    """What one rank that failed said, or how it ended."""
    if outcome.hung:
        return f"hang, ended after {outcome.after_s:.0f} s"
    if outcome.died is not None:
        how = f"signal {-outcome.died}" if outcome.died < 0 else f"exit {outcome.died}"
        return f"process dies ({how}): {shorten(outcome.error or 'without a word')}"
    said = shorten(outcome.cause or outcome.error or "")
    if "Timed out waiting" in said:
        usual_s = default_pg_timeout.total_seconds()
        return f"hang, until the group's timeout ({GROUP_TIMEOUT_S:.0f} s here, {usual_s:.0f} else)"
    return f"error, {said}"


def shorten(line: str) -> str:
    """An error's line without the file that gloo names, and without ports and addresses."""
    line = re.sub(r"\[/?[^\]]*\.(cc|h|cpp):\d+\] ?", "", line)
    line = re.sub(r"\[[0-9a-f]*[.:][0-9a-f.:]*\](:\d+)?", "[address]", line)
    line = " ".join(line.split())
    if len(line) > _LONGEST:
        line = line.split(". ")[0] + " …"
    return line if len(line) <= 2 * _LONGEST else line[: 2 * _LONGEST] + "…"


def _said_by(row: Row, ranks: int) -> str:
    whose = row.under.split(", ")
    if len(whose) == ranks:
        return f"{row.words} (every rank)" if ranks > 1 else row.words
    return f"{row.words} (rank {', '.join(whose)})"


def _follows(outcome: Outcome) -> bool:
    """Whether a rank failed since another one had."""
    said = f"{outcome.error} {outcome.cause}"
    return outcome.hung or "Timed out waiting" in said or any(word in said for word in _CLOSED)


def _named(names: list[str], pairs: Mapping[str, object]) -> str:
    stages = sorted({name.split(".")[0] for name in names}, key=int)
    whole = [n for n in pairs if n.split(".")[0] in stages]
    where = f"stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"
    return where if len(names) == len(whole) else f"{len(names)} weights of {where}"


def _where(off: list[str], both: list[str]) -> str:
    return "" if len(off) == len(both) else f", in {_named(off, dict.fromkeys(both))}"
