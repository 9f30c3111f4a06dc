"""What the engine costs: `python benchmarks/engine PART [flags]`, or --help.

Each part runs everything that it compares in turn in one pool of processes, so that its ratios
hold whatever the machine; run them on one that does nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import memory
import overlap
import paced
import pool
import real
import sampled
import sections

PARTS = {
    "paced": paced,
    "real": real,
    "memory": memory,
    "overlap": overlap,
    "sections": sections,
    "sampled": sampled,
}


def main() -> None:
    """Run one part and print its table."""
    parser = argparse.ArgumentParser(prog="python benchmarks/engine", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, module in PARTS.items():
        part = parts.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(part)
        part.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    given = parser.parse_args()
    where = pool.machine()
    print(where)
    rows = PARTS[given.part].main(given)
    if given.json:
        given.json.write_text(json.dumps({"machine": where, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
