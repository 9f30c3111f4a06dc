"""One model under four schedules: what does each cost in idle time and in memory?

The model's work is the same in every row, so a rank with v stages gets stages of 1/v the time.
"""

from fullbore.cost import Costs
from fullbore.schedules import build
from fullbore.sim import simulate
from fullbore.timeline import summarize

RANKS, MICROBATCHES = 8, 32

print(f"P={RANKS}, M={MICROBATCHES}, forward 1 s and backward 2 s a rank and microbatch")
print("schedule         makespan  bubble fraction  peak activations")
for name, virtual_stages in (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("looped-bfs", 2),
):
    schedule = build(name, ranks=RANKS, microbatches=MICROBATCHES, virtual_stages=virtual_stages)
    costs = Costs.uniform(
        stages=schedule.stages, forward_s=1 / virtual_stages, backward_s=2 / virtual_stages
    )
    figures = summarize(simulate(schedule, costs), schedule)
    print(
        f"{name:12s} v={virtual_stages}  {figures.makespan_s:6.1f} s  "
        f"{figures.bubble_fraction:14.1%}  {max(figures.peak_activations):16.4g}"
    )
