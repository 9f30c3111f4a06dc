"""`fullbore schedules`: what can be asked for, what it costs and what it demands."""

from __future__ import annotations

from fullbore.cli.options import JsonFlag

__all__ = ["schedules"]

LEGEND = """\
P ranks, v stages a rank, M microbatches a step, G microbatches a group.
Bubble fraction is idle / total time, bubble overhead idle / ideal time; i is a rank's idle time,
F, I and W the seconds of a stage, B = I + W, T = F + B. All hold for equal stages and no latency.
Peak activations: the worst rank's, in microbatches × 1/P of the model."""


def schedules(*, as_json: JsonFlag = False) -> None:
    """List the schedules, with their formulas and demands."""
    from fullbore.cli.output import print_json
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
                    "holds": family.holds,
                    "constraints": family.constraints,
                    "takes_virtual_stages": family.takes_virtual_stages,
                    "takes_group_size": family.takes_group,
                    "takes_slices": family.takes_slices,
                    "runs": family.runs,
                }
                for family in FAMILIES
            ]
        )
        return
    for family in FAMILIES:
        print(f"{family.name}: {family.summary}")
        print(f"  bubble fraction   {family.bubble}")
        print(f"  bubble overhead   {family.bubble_overhead}")
        print(f"  these formulas    {family.holds}")
        print(f"  peak activations  {family.memory}")
        print(f"  constraints       {family.constraints}\n")
    print(LEGEND)
