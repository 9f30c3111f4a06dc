"""A language model's head weighs as much as several layers: balance by cost, not by count.

Thirty equal layers and a head worth eight of them, on four ranks: cut by layer count, and cut so
that the heaviest stage is as light as possible.
"""

from fullbore.cost import Costs
from fullbore.cost.partition import partition
from fullbore.schedules import one_f_one_b
from fullbore.sim import simulate
from fullbore.timeline import summarize

RANKS, MICROBATCHES = 4, 16
LAYER_S = 0.010
HEAD = 8.0
weights = [1.0] * 30 + [HEAD]

print("layers a stage (the head counts as one)  bubble fraction  makespan")
for sizes in ((8, 8, 8, 7), partition(weights, RANKS)):
    ends = [sum(sizes[: rank + 1]) for rank in range(RANKS)]
    work = [sum(weights[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    stages = [{"forward_s": LAYER_S * w, "backward_s": 2 * LAYER_S * w} for w in work]
    schedule = one_f_one_b(ranks=RANKS, microbatches=MICROBATCHES)
    figures = summarize(simulate(schedule, Costs.parse({"stages": stages})), schedule)
    print(f"{sizes!s:39s}  {figures.bubble_fraction:15.1%}  {figures.makespan_s:6.2f} s")
