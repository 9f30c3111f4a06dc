"""Rows of a published table, reproduced to the four decimals that it prints.

Table 5 of "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241) gives the bubble that its authors
simulated from their profile (Table 9): milliseconds of F, B (our I) and W of a whole rank, and of
one hop. Its bubble counts the longest span of one rank. Its 1F1B-I charges the hop from the last
rank to the first only once a group; the column `bubble_all_hops` charges every one.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from fullbore import schedules
from fullbore.cost import Costs
from fullbore.sim import simulate
from fullbore.timeline import summarize

TABLE = Path(__file__).parents[1] / "data" / "published.csv"
NAMES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
ROWS = list(csv.DictReader(TABLE.open(encoding="utf-8")))


def test_the_table_is_whole():
    assert [row["schedule"] for row in ROWS] == ["1F1B", "1F1B-I", "ZB-H1", "ZB-H2"] * 6


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['schedule']}-{row['P']}x{row['M']}")
def test_published_bubble(row):
    ranks, microbatches, v = (int(row[name]) for name in ("P", "M", "v"))
    schedule = schedules.build(
        NAMES[row["schedule"]],
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=v if v > 1 else None,
    )
    forward_s, input_grad_s, weight_grad_s, hop_s = (
        float(row[name]) / 1000 for name in ("TF", "TB", "TW", "Tcomm")
    )
    costs = Costs.uniform(
        stages=ranks * v,
        forward_s=forward_s / v,
        input_grad_s=input_grad_s / v,
        weight_grad_s=weight_grad_s / v,
        hop_s=hop_s,
    )
    found = summarize(simulate(schedule, costs), schedule).span_bubble_fraction
    assert f"{found:.4f}" == (row["bubble_all_hops"] or row["bubble"])
