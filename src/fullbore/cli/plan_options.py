"""Options of `fullbore plan`: how times and memory are modelled, and how long is searched."""

from __future__ import annotations

from typing import Annotated

from fullbore.cli.training_options import option

__all__ = [
    "Causal",
    "Flash",
    "OverlapExperts",
    "OverlapGradients",
    "OverlapMessages",
    "OverlapParameters",
    "OverlapTensor",
    "SearchIterations",
    "SearchTime",
]

_MODEL = "How times and memory are modelled"
_EFFORT = "Schedules that have no name"

Flash = Annotated[
    bool | None,
    option(
        _MODEL,
        "--use-flash-attn/--no-flash-attn",
        help="Whether attention is fused and keeps no scores.",
    ),
]
Causal = Annotated[
    bool,
    option(
        _MODEL,
        "--causal/--no-causal",
        help="Whether model FLOPs leave out the half of attention that the mask hides.",
    ),
]
OverlapMessages = Annotated[
    bool | None,
    option(
        _MODEL,
        "--overlap-p2p-communication/--no-overlap-p2p-communication",
        help="Whether ranks compute while messages between stages travel.",
    ),
]
OverlapGradients = Annotated[
    bool | None,
    option(
        _MODEL,
        "--overlap-grad-reduce/--no-overlap-grad-reduce",
        help="Whether gradients are summed over replicas beside the last backward.",
    ),
]
OverlapParameters = Annotated[
    bool | None,
    option(
        _MODEL,
        "--overlap-param-gather/--no-overlap-param-gather",
        help="Whether weights that replicas share out are gathered beside the first forward; only "
        "with --overlap-grad-reduce.",
    ),
]
OverlapTensor = Annotated[
    bool | None,
    option(
        _MODEL,
        "--tp-comm-overlap/--no-tp-comm-overlap",
        help="Whether tensor-parallel messages of a forward travel beside its products.",
    ),
]
OverlapExperts = Annotated[
    bool | None,
    option(
        _MODEL,
        "--overlap-moe-expert-parallel-comm/--no-overlap-moe-expert-parallel-comm",
        help="Whether tokens travel to experts and back beside another microbatch's work.",
    ),
]
SearchTime = Annotated[
    float,
    option(
        _EFFORT,
        "--search-time",
        metavar="S",
        help="Seconds to search for schedules without a name, for the best plans; 0 if not "
        "given. See fullbore search.",
    ),
]
SearchIterations = Annotated[
    int | None,
    option(
        _EFFORT,
        "--search-iterations",
        metavar="N",
        help="Moves of that search at the most; where they end it, the answer is always the same.",
    ),
]
