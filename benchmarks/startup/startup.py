"""How long `fullbore --help` takes: the median of N runs; the goal is at most 0.5 s.

python benchmarks/startup/startup.py [--runs 20]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

GOAL_S = 0.5


def once_s(arguments: list[str]) -> float:
    """Seconds that one run of the command takes, the interpreter's own start included."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "fullbore", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=60,
    )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    for arguments in (["--help"], ["simulate", "1f1b", "-p", "8", "-m", "32"]):
        once_s(arguments)  # fills the caches of files and byte code
        times_s = sorted(once_s(arguments) for _ in range(runs))
        print(
            f"fullbore {' '.join(arguments)}: median {statistics.median(times_s):.3f} s, "
            f"from {times_s[0]:.3f} to {times_s[-1]:.3f} s in {runs} runs"
        )
        if arguments == ["--help"] and statistics.median(times_s) > GOAL_S:
            sys.exit(f"slower than the goal of {GOAL_S} s")


if __name__ == "__main__":
    main()
