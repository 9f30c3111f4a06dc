"""What torch.distributed.pipelining does in the cases of docs/peers.md: `python benchmarks/peers`.

Each case runs real processes over gloo on this machine, tiny stages, beside the same stages in one
process, and says what came of it. A case takes at most 20 s; one that waits longer is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boundaries
import crashes
import flags
import memory
import torch
import totals
import wrong_numbers
from bench import Bench, OutOfTime, warm_up
from words import Row, together

Case = Callable[[Bench], Iterator[Row]]

CASES: dict[int, Case] = {
    **wrong_numbers.CASES,
    **totals.CASES,
    **crashes.CASES,
    **boundaries.CASES,
    **memory.CASES,
    **flags.CASES,
}


def main() -> None:
    """Run the cases asked for, print what became of each, and write it down if asked."""
    parser = argparse.ArgumentParser(prog="python benchmarks/peers", description=__doc__)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", choices=sorted(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    given = parser.parse_args()
    where = f"torch {torch.__version__}, gloo, {platform.machine()}, {os.cpu_count()} cores"
    print(where)
    warm_up()
    found = [run(number) for number in given.only or sorted(CASES)]
    if given.json:
        given.json.write_text(json.dumps({"on": where, "cases": found}, indent=2) + "\n")


def run(number: int) -> dict[str, object]:
    """One case, printed."""
    title = (CASES[number].__doc__ or "").strip()
    begun_s = time.monotonic()
    rows: list[Row] = []
    try:
        rows.extend(CASES[number](Bench()))
    except OutOfTime as over:
        rows.append(Row(tried="the rest", words=str(over)))
    took_s = time.monotonic() - begun_s
    print(f"\n{number}. {title} ({took_s:.0f} s)", flush=True)
    rows = together(rows)
    for row in rows:
        print(f"   {row}", flush=True)
    said = [{"tried": row.tried, "under": row.under, "words": row.words} for row in rows]
    return {"case": number, "title": title, "seconds": round(took_s, 1), "rows": said}


if __name__ == "__main__":
    main()
