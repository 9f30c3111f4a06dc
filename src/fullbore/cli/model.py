"""`fullbore model CONFIG`: what a model costs, tensor by tensor, before anyone rents a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullbore.cli.kernel_options import CudaGraphModules, CudaGraphs, TokenDispatcher
from fullbore.cli.options import JsonFlag
from fullbore.cli.precision_options import (
    Bf16,
    Fp8,
    Fp8Mx,
    Fp8Weights,
    Fp16,
    Fp32,
    PrecisionName,
    precision_name,
)
from fullbore.cli.training_options import option

__all__ = ["model"]

_MODEL = "Model"
_SPLIT = "How the model is spread over ranks"
_WORK = "Work and memory of one microbatch"
_STATES = "Weights, gradients and optimizer"
_COUNTED = "What is counted"

Config = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG",
        help="A Hugging Face config.json, or a folder that has one.",
        show_default=False,
    ),
]


def model(
    config: Config = None,
    *,
    megatron: Annotated[
        str | None,
        option(
            _MODEL,
            "--megatron",
            metavar="FLAGS",
            help="Instead of CONFIG: Megatron-LM's arguments in quotes, or a .sh or .yaml file "
            "of them. What they say about splitting and memory holds unless it is given here.",
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        option(
            _SPLIT,
            "--tensor-model-parallel-size",
            metavar="T",
            help="Ranks that each layer's width is cut over, 1.",
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        option(
            _SPLIT,
            "--sequence-parallel/--no-sequence-parallel",
            help="Whether norms and sums are cut along the sequence over the same ranks.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        option(
            _SPLIT,
            "--context-parallel-size",
            metavar="CP",
            help="Ranks that the sequence is cut over everywhere, 1.",
        ),
    ] = None,
    expert: Annotated[
        int | None,
        option(
            _SPLIT,
            "--expert-model-parallel-size",
            metavar="EP",
            help="Ranks that experts are spread over, 1.",
        ),
    ] = None,
    expert_tensor: Annotated[
        int | None,
        option(
            _SPLIT,
            "--expert-tensor-parallel-size",
            metavar="ETP",
            help="Ranks that one expert's width is cut over, T.",
        ),
    ] = None,
    sequence: Annotated[
        int | None,
        option(
            _WORK,
            "--seq-length",
            metavar="N",
            help="Tokens a sequence: 4096, or as many as there are learned positions.",
        ),
    ] = None,
    microbatch: Annotated[
        int | None,
        option(_WORK, "--micro-batch-size", metavar="N", help="Sequences a microbatch, 1."),
    ] = None,
    recompute: Annotated[
        str | None,
        option(
            _WORK,
            "--recompute-granularity",
            metavar="WHAT",
            help="What is made again instead of kept: none, selective (some modules of a layer) or "
            "full (all of a layer but its input); none.",
        ),
    ] = None,
    recompute_layers: Annotated[
        int | None,
        option(
            _WORK,
            "--recompute-num-layers",
            metavar="N",
            help="Of full: only the first N layers.",
        ),
    ] = None,
    recompute_modules: Annotated[
        str | None,
        option(
            _WORK,
            "--recompute-modules",
            metavar="NAME,...",
            help="Of selective: what is made again, of core_attn (if not given), layernorm, "
            "mla_up_proj, mlp, moe, moe_act and shared_experts.",
        ),
    ] = None,
    flash: Annotated[
        bool | None,
        option(
            _WORK,
            "--use-flash-attn/--no-flash-attn",
            help="Whether attention keeps no scores; it does not, if not given.",
        ),
    ] = None,
    kernels: Annotated[
        str,
        option(
            _WORK,
            "--kernels",
            metavar="STYLE",
            help="Whose tensors are kept: fused, as Megatron-LM's kernels do, or eager, as Hugging "
            "Face's modules do, one operation after another.",
        ),
    ] = "fused",
    dispatcher: TokenDispatcher = None,
    cuda_graph_impl: CudaGraphs = None,
    cuda_graph_modules: CudaGraphModules = None,
    precision: PrecisionName = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    fp32: Fp32 = False,
    fp8: Fp8 = False,
    fp8_mx: Fp8Mx = False,
    fp8_weights: Fp8Weights = False,
    data_parallel: Annotated[
        int | None,
        option(
            _STATES,
            "--data-parallel-size",
            metavar="D",
            help="Replicas that a sharded optimizer is spread over: as few as there can be.",
        ),
    ] = None,
    distributed_optimizer: Annotated[
        bool,
        option(
            _STATES,
            "--use-distributed-optimizer",
            help="Share the optimizer's states out over replicas (ZeRO-1).",
        ),
    ] = False,
    sharding: Annotated[
        str | None,
        option(
            _STATES,
            "--data-parallel-sharding-strategy",
            metavar="WHAT",
            help="no_shard, optim (ZeRO-1), optim_grads (2) or optim_grads_params (3).",
        ),
    ] = None,
    causal: Annotated[
        bool,
        option(
            _COUNTED,
            "--causal/--no-causal",
            help="Whether FLOPs leave out the half of attention that the mask hides.",
        ),
    ] = True,
    tokens_per_s: Annotated[
        float | None,
        option(
            _COUNTED,
            "--tokens-per-s-per-gpu",
            metavar="X",
            help="A measured rate: prints MFU and HFU, with --peak-tflops.",
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        option(
            _COUNTED,
            "--peak-tflops",
            metavar="X",
            help="Dense peak of one GPU, such as 989 for an H100 in bf16.",
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show every product, tensor and message of each piece."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a model's parameters, FLOPs and bytes, layer by layer.

    For one rank and one microbatch, with embedding and head. Bytes are those kept for the backward.
    F is the forward, I and W the two halves of the backward (gradients of inputs and of weights).

    Try: fullbore model examples/configs/llama3-8b --seq-length 8192 --explain
    """
    from fullbore.cli.model_inputs import Asked, read_setting
    from fullbore.cli.output import print_json

    setting = read_setting(
        Asked(
            config=config,
            megatron=megatron,
            tensor=tensor,
            sequence_parallel=sequence_parallel,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            sequence=sequence,
            microbatch=microbatch,
            recompute=recompute,
            recompute_layers=recompute_layers,
            recompute_modules=recompute_modules,
            flash=flash,
            kernels=kernels,
            precision=precision_name(
                precision,
                bf16=bf16,
                fp16=fp16,
                fp32=fp32,
                fp8=fp8,
                fp8_mx=fp8_mx,
                fp8_weights=fp8_weights,
            ),
            dispatcher=dispatcher,
            graphs=cuda_graph_impl,
            graph_modules=cuda_graph_modules,
            data_parallel=data_parallel,
            sharding=sharding or ("optim" if distributed_optimizer else None),
            causal=causal,
            tokens_per_s=tokens_per_s,
            peak_tflops=peak_tflops,
        )
    )
    if as_json:
        from fullbore.cli.model_document import document

        print_json(document(setting))
        return
    from fullbore.cli.model_tables import explanation, summary

    print(summary(setting))
    if explain:
        print("", explanation(setting), sep="\n")
