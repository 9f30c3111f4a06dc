"""What `fullbore search` finds, against the best named schedule and against the lower bound.

python benchmarks/search [--help]

Three tables: published profiles under several memory limits; uneven profiles as they occur; sizes.
Exit status 1 where a goal is missed: never worse than the best named schedule that fits; on the
published profiles at 1F1B's memory a makespan at most 1 % above the bound for P = 8, and span
bubbles at most those printed for ZB-1p (1F1B's memory) and ZB-2p (twice that).
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import dataclass, replace

from profiles import Profile, Published, published, uneven

from fullbore.cost import Costs
from fullbore.search import Found, Job, Limits, MemoryLimit, search
from fullbore.sim import simulate
from fullbore.timeline import Summary, summarize
from fullbore.verify import check

missed: list[str] = []


def main() -> None:
    """Print the tables that were asked for."""
    args = arguments()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{platform.machine()}, {cores} cores, Python {platform.python_version()}")
    tables = {"published": published_table, "uneven": uneven_table, "sizes": sizes_table}
    for name in args.tables or tables:
        tables[name](args.time_limit)
    if missed:
        sys.exit("missed:\n  " + "\n  ".join(missed))


def arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    parser.add_argument("tables", nargs="*", help="published, uneven or sizes; all by default")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds a search (10)")
    return parser.parse_args()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was found, and its figures."""

    found: Found
    summary: Summary

    @property
    def named(self) -> str:
        """The best named schedule, and how much longer it takes."""
        best = self.found.named
        if best is None:
            return "none fits"
        return f"{best.name} +{(best.value_s / self.found.value_s - 1) * 100:.1f} %"


def look(profile: Profile, limit: str, *, time_s: float, spans: bool = False) -> Result:
    """One search, checked."""
    job = Job(
        costs=profile.costs,
        ranks=profile.ranks,
        microbatches=profile.microbatches,
        virtual_stages=None,
        memory_limit=MemoryLimit.parse(limit),
        spans=spans,
    )
    found = search(job, limits=Limits(time_s=time_s))
    check(found.schedule)
    summary = summarize(simulate(found.schedule, found.costs), found.schedule)
    if found.named is not None and found.value_s > found.named.value_s:
        missed.append(f"{profile.name}, {limit}: {found.named.name} is better")
    return Result(found=found, summary=summary)


def row(*cells: object) -> None:
    """A row of a table in Markdown, printed as soon as it is known."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def heading(title: str, *columns: str) -> None:
    print(f"\n{title}\n")
    row(*columns)
    row(*("---" for _ in columns))


def bubble(share: float) -> str:
    return f"{share:.4f}"


def cells(result: Result) -> tuple[str, ...]:
    """The columns that all tables end in."""
    return (
        bubble(result.summary.bubble_fraction),
        bubble(result.summary.span_bubble_fraction),
        f"{result.found.gap * 100:.2f} %",
        result.named,
        result.found.placement,
        f"{max(result.summary.peak_activations):.3g}",
        f"{result.found.elapsed_s:.1f}",
    )


COLUMNS = (
    *("bubble", "span bubble", "gap at most", "best named takes", "placement"),
    *("peak activations", "s"),
)


def published_table(time_s: float) -> None:
    """Makespan and span at several limits, beside the printed span bubbles."""
    heading(
        "Published profiles. In microbatches a W holds what its F does; in bytes what the paper says",
        *("profile", "memory", "objective", "printed", *COLUMNS),
    )
    for one in published():
        counted = replace(one.profile, costs=_without_bytes(one.profile.costs))
        half, third = (one.profile.ranks + 2) // 2, (one.profile.ranks + 4) // 3
        for profile, limit, spans, printed in (
            (counted, "1x", False, ""),
            (counted, "1x", True, "ZB-1p"),
            (one.profile, "2x", True, "ZB-2p"),
            (counted, "2x", False, ""),
            (counted, str(half), False, ""),
            (counted, str(third), False, ""),
        ):
            _published_row(one, profile, limit, time_s=time_s, spans=spans, printed=printed)


def _published_row(
    one: Published, profile: Profile, limit: str, *, time_s: float, spans: bool, printed: str
) -> None:
    result = look(profile, limit, time_s=time_s, spans=spans)
    figure = one.printed.get(printed)
    told = f"{figure:.4f} {printed}" if figure is not None else ""
    unit = "" if limit.endswith("x") else " microbatches"
    unit = " bytes" if profile.costs.stages[0].activation_bytes else unit
    objective = "span" if spans else "makespan"
    row(profile.name, f"{limit}{unit}", objective, told, *cells(result))
    if figure is not None and result.summary.span_bubble_fraction > figure + 5e-5:
        missed.append(f"{profile.name}, {limit}: span bubble above {told}")
    if limit == "1x" and not spans and profile.ranks <= 8 and result.found.gap > 0.01:
        missed.append(f"{profile.name}, {limit}: {result.found.gap:.2%} above the bound")


def _without_bytes(costs: Costs) -> Costs:
    bare = {"activation_bytes": None, "input_grad_held_bytes": None}
    return costs.model_copy(
        update={"stages": tuple(stage.model_copy(update=bare) for stage in costs.stages)}
    )


def uneven_table(time_s: float) -> None:
    """Costs as they occur, at 1F1B's memory."""
    heading(f"Uneven costs, makespan, 1F1B's memory, {time_s:g} s", "profile", *COLUMNS)
    for profile in uneven():
        row(profile.name, *cells(look(profile, "1x", time_s=time_s)))


def sizes_table(time_s: float) -> None:
    """How far a minute goes on the largest size, and less on smaller ones."""
    heading("Sizes, even costs, makespan, 1F1B's memory", "P, M, v up to 2", "limit, s", *COLUMNS)
    for ranks, microbatches, seconds in ((4, 16, 2), (8, 32, 10), (16, 64, 20), (32, 256, 60)):
        costs = Costs.uniform(
            stages=2 * ranks, forward_s=0.01, input_grad_s=0.0098, weight_grad_s=0.007, hop_s=3e-4
        )
        profile = Profile(
            name=f"{ranks}, {microbatches}", ranks=ranks, microbatches=microbatches, costs=costs
        )
        row(profile.name, seconds, *cells(look(profile, "1x", time_s=float(seconds))))


if __name__ == "__main__":
    main()
