"""What page faults cost: SmolLM2's last blocks and head on one core, with three kinds of memory.

As glibc gives it by itself, in large pages, and kept by the process once it is freed.

python benchmarks/pages/pages.py [--rounds 3] [--microbatches 12]

The kind is settled when a process begins, so each round runs one of each, in turn.
Prints medians: seconds of a forward and of a backward, page faults of both, resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

KINDS = {
    "as it is": {},
    "large pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    "kept": {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=12, help="the first three are warm-up")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(given.microbatches)))
        return
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):
        for kind, variables in KINDS.items():
            found[kind].append(child(variables, given.microbatches))
    for kind, rounds in found.items():
        median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        print(
            f"{kind:>11}: forward {median['forward_s']:.3f} s, backward "
            f"{median['backward_s']:.3f} s, {median['faults']:.0f} page faults, "
            f"{median['resident_mib']:.0f} MiB resident"
        )


def child(variables: dict[str, str], microbatches: int) -> dict[str, float]:
    """The figures of a process of its own."""
    words = [sys.executable, __file__, "--here", "--microbatches", str(microbatches)]
    environment = {**os.environ, **variables}
    ran = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, timeout=300)
    return dict(json.loads(ran.stdout))


def measure(microbatches: int) -> dict[str, float]:
    """Forward and backward of 64 tokens through the last eight blocks, head and loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(config.vocab_size, (1, 64))
    rows = []
    for _ in range(microbatches):
        faults, start_s = page_faults(), time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        between_s = time.perf_counter()
        loss.backward()
        ended_s = time.perf_counter()
        rows.append((between_s - start_s, ended_s - between_s, page_faults() - faults))
    forward_s, backward_s, faults = map(statistics.median, zip(*rows[3:], strict=True))
    resident_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "faults": faults,
        "resident_mib": resident_mib,
    }


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    main()
