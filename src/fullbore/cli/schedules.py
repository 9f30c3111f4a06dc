"""`fullbore schedules`: what can be asked for, what it costs and what it demands."""

from __future__ import annotations

from fullbore.cli.options import JsonFlag

__all__ = ["schedules"]

LEGEND = (
    "P ranks, v stages a rank, M microbatches, G microbatches a group. "
    "Bubble fraction: idle / total. Peak activations: worst rank, microbatches × 1/P of the model."
)


def schedules(*, as_json: JsonFlag = False) -> None:
    """List the schedules: bubble and memory formulas, and what P, v, M and G must satisfy."""
    from fullbore.cli.output import console, print_json
    from fullbore.schedules import FAMILIES

    if as_json:
        print_json(
            [
                {
                    "name": family.name,
                    "summary": family.summary,
                    "bubble_fraction": family.bubble,
                    "bubble_overhead": family.bubble_overhead,
                    "peak_activations": family.memory,
                    "constraints": family.constraints,
                    "takes_virtual_stages": family.takes_virtual_stages,
                    "takes_group_size": family.takes_group,
                }
                for family in FAMILIES
            ]
        )
        return
    screen = console()
    for family in FAMILIES:
        screen.print(f"[bold]{family.name}[/]  {family.summary}")
        screen.print(f"  bubble fraction   {family.bubble}")
        screen.print(f"  peak activations  {family.memory}")
        screen.print(f"  constraints       {family.constraints}")
        screen.print()
    screen.print(LEGEND, style="dim")
