"""Options that `plan` and `model` share about kernels, with the names that Megatron-LM has."""

from __future__ import annotations

from typing import Annotated

from fullbore.cli.training_options import option

__all__ = ["CudaGraphModules", "CudaGraphs", "TokenDispatcher"]

_KERNELS = "How kernels are started, and tokens sent to experts"

TokenDispatcher = Annotated[
    str | None,
    option(
        _KERNELS,
        "--moe-token-dispatcher-type",
        metavar="NAME",
        help="alltoall, or flex: once to each rank and node (DeepEP, HybridEP).",
    ),
]
CudaGraphs = Annotated[
    str | None,
    option(
        _KERNELS,
        "--cuda-graph-impl",
        metavar="NAME",
        help="What replays kernels that the host would start one by one: none, local, "
        "transformer_engine or full_iteration.",
    ),
]
CudaGraphModules = Annotated[
    str | None,
    option(
        _KERNELS,
        "--cuda-graph-modules",
        metavar="LIST",
        help="Of local and transformer_engine: attn,mlp,moe_router,moe_preprocess,moe; all if not "
        "given.",
    ),
]
