"""`fullbore plan`: the fastest way to train a model on a cluster, with memory, time and reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullbore.cli.kernel_options import CudaGraphModules, CudaGraphs, TokenDispatcher
from fullbore.cli.options import JOB, Cluster, JsonFlag
from fullbore.cli.plan_options import (
    Causal,
    Flash,
    OverlapExperts,
    OverlapGradients,
    OverlapMessages,
    OverlapParameters,
    OverlapTensor,
    SearchIterations,
    SearchTime,
)
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

__all__ = ["plan"]

_FIXED = (
    "What is decided already (several values, such as 4,8, are all tried; any leaves open what "
    "Megatron-LM's arguments say)"
)
_RESULT = "Result"

Numbers = str | None


def plan(
    context: typer.Context,
    *,
    model: Annotated[
        str | None,
        option(
            JOB,
            "--model",
            metavar="CONFIG",
            help="A Hugging Face config.json or its folder, or Megatron-LM's arguments in a .sh or "
            ".yaml file, whose batch, sequence length and sizes hold unless others are given here.",
        ),
    ] = None,
    cluster: Cluster = None,
    global_batch_size: Annotated[
        int | None,
        option(
            JOB,
            "--global-batch-size",
            metavar="N",
            help="Sequences a step.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        option(
            JOB,
            "--preset",
            metavar="64gpu-80layer",
            help="Instead of all of these: a job in circulation, under GPipe, 1F1B, interleaved "
            "and the best (docs/job64.md).",
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        option(
            JOB,
            "--seq-length",
            metavar="N",
            help="Tokens a sequence: 4096, or as many as there are learned positions.",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        option(
            JOB,
            "--memory-limit",
            metavar="X",
            help="What a device may hold, such as 70GB; all of its memory if not given.",
        ),
    ] = None,
    pipeline: Annotated[
        Numbers,
        option(
            _FIXED, "--pipeline-model-parallel-size", "-p", metavar="P,...", help="Pipeline ranks."
        ),
    ] = None,
    tensor: Annotated[
        Numbers,
        option(
            _FIXED,
            "--tensor-model-parallel-size",
            metavar="T,...",
            help="Ranks that a layer's width is cut over; within a node.",
        ),
    ] = None,
    context_parallel: Annotated[
        Numbers,
        option(
            _FIXED,
            "--context-parallel-size",
            metavar="C,...",
            help="Ranks that the sequence is cut over, 1.",
        ),
    ] = None,
    expert: Annotated[
        Numbers,
        option(
            _FIXED,
            "--expert-model-parallel-size",
            metavar="E,...",
            help="Ranks that experts are spread over, 1.",
        ),
    ] = None,
    expert_tensor: Annotated[
        int | None,
        option(
            _FIXED,
            "--expert-tensor-parallel-size",
            metavar="N",
            help="Ranks that one expert's width is cut over, T.",
        ),
    ] = None,
    micro_batch_size: Annotated[
        Numbers,
        option(_FIXED, "--micro-batch-size", metavar="N,...", help="Sequences a microbatch."),
    ] = None,
    virtual_stages: Annotated[
        Numbers,
        option(
            _FIXED,
            "--num-virtual-stages-per-pipeline-rank",
            "--virtual-stages",
            "-v",
            metavar="V,...",
            help="Stages a rank.",
        ),
    ] = None,
    group_size: Annotated[
        Numbers,
        option(
            _FIXED,
            "--microbatch-group-size-per-virtual-pipeline-stage",
            "-g",
            metavar="G,...",
            help="Microbatches that a stage of an interleaved schedule takes in a row.",
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        option(
            _FIXED,
            "--schedule",
            metavar="NAME,...",
            help="Names that `fullbore schedules` lists and the engine runs on whole sequences.",
        ),
    ] = None,
    stage_layers: Annotated[
        Numbers,
        option(
            _FIXED,
            "--stage-layers",
            metavar="N,N,...",
            help="Layers of each stage; by cost, embedding and head included, if not given.",
        ),
    ] = None,
    recompute_granularity: Annotated[
        str | None,
        option(
            _FIXED,
            "--recompute-granularity",
            metavar="WHAT",
            help="none, selective or full.",
        ),
    ] = None,
    recompute_num_layers: Annotated[
        int | None,
        option(
            _FIXED,
            "--recompute-num-layers",
            metavar="N",
            help="Of full: only the first N layers of each stage.",
        ),
    ] = None,
    recompute_modules: Annotated[
        str | None,
        option(
            _FIXED,
            "--recompute-modules",
            metavar="NAME,...",
            help="Of selective: core_attn (if not given), layernorm, mla_up_proj, mlp, moe, "
            "moe_act, shared_experts.",
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        option(
            _FIXED,
            "--sequence-parallel/--no-sequence-parallel",
            help="Whether norms and sums are cut along the sequence too; where T > 1 if not given.",
        ),
    ] = None,
    distributed_optimizer: Annotated[
        bool | None,
        option(
            _FIXED,
            "--use-distributed-optimizer/--no-use-distributed-optimizer",
            help="Whether replicas share out the optimizer's states; where there are several if "
            "not given.",
        ),
    ] = None,
    precision: PrecisionName = None,
    bf16: Bf16 = False,
    fp16: Fp16 = False,
    fp32: Fp32 = False,
    fp8: Fp8 = False,
    fp8_mx: Fp8Mx = False,
    fp8_weights: Fp8Weights = False,
    flash: Flash = None,
    causal: Causal = True,
    overlap_p2p: OverlapMessages = None,
    overlap_grad_reduce: OverlapGradients = None,
    overlap_param_gather: OverlapParameters = None,
    tp_comm_overlap: OverlapTensor = None,
    overlap_experts: OverlapExperts = None,
    dispatcher: TokenDispatcher = None,
    cuda_graph_impl: CudaGraphs = None,
    cuda_graph_modules: CudaGraphModules = None,
    search_time: SearchTime = 0.0,
    search_iterations: SearchIterations = None,
    top: Annotated[int, option(_RESULT, "--top", metavar="N", help="How many plans to list.")] = 10,
    output: Annotated[
        Path | None,
        option(
            _RESULT,
            "--output",
            "-o",
            metavar="FILE.html",
            help="Write a page with the picture of memory against time, and all tables.",
        ),
    ] = None,
    output_schedule: Annotated[
        Path | None,
        option(
            _RESULT,
            "--output-schedule",
            metavar="FILE.csv",
            help="Write the best plan's schedule, in PyTorch's format.",
        ),
    ] = None,
    output_costs: Annotated[
        Path | None,
        option(
            _RESULT,
            "--output-costs",
            metavar="FILE.json",
            help="Write the costs of the best plan's stages, for show, simulate and search.",
        ),
    ] = None,
    emit: Annotated[
        str | None,
        option(
            _RESULT,
            "--emit",
            metavar="NAME,...",
            help="Write launch files: for fullbore, megatron, deepspeed or torchtitan (the plan "
            "keeps to what these run), and with slurm or k8s for a cluster that starts the first "
            "of them, fullbore if there is none: --emit slurm,megatron.",
        ),
    ] = None,
    emit_folder: Annotated[
        Path,
        option(
            _RESULT,
            "--emit-folder",
            metavar="FOLDER",
            help="Where to write them; launch if not given.",
        ),
    ] = Path("launch"),
    as_json: JsonFlag = False,
) -> None:
    """Find how to train a model on a cluster, and why not otherwise.

    Tries pipeline, tensor and data parallelism, microbatch sizes, schedules with their virtual
    stages and groups, splits of layers and recomputation. Each candidate is simulated, unless a
    lower bound says that it cannot be among the best. Ctrl-C keeps the best so far.

      fullbore plan --model examples/configs/llama3-70b --cluster h100:8x8 --global-batch-size 128

    With --emit slurm at the end of it, launch/slurm.sbatch starts that plan on the cluster.
    """
    if preset is not None:
        from fullbore.cli.plan_job import show_preset

        show_preset(preset, typed=_typed(context), as_json=as_json)
        return
    from fullbore.cli.output import check_place
    from fullbore.cli.plan_asked import Asked
    from fullbore.cli.plan_emit import Emission, typed_command
    from fullbore.cli.plan_inputs import make_question
    from fullbore.cli.plan_run import Files, hand_over, run
    from fullbore.plan import Effort
    from fullbore.plan.emit import Targets

    check_place(output, output_schedule, output_costs)
    targets = Targets.parse(emit)
    launch = Emission(
        targets=targets, folder=emit_folder, model=model, command=typed_command(context)
    )
    files = Files(page=output, schedule=output_schedule, costs=output_costs, launch=launch)
    of_products = precision_name(
        precision, bf16=bf16, fp16=fp16, fp32=fp32, fp8=fp8, fp8_mx=fp8_mx, fp8_weights=fp8_weights
    )
    asked = Asked(
        model=model,
        cluster=cluster,
        global_batch=global_batch_size,
        sequence=seq_length,
        memory_limit=memory_limit,
        pipeline=pipeline,
        tensor=tensor,
        context=context_parallel,
        expert=expert,
        expert_tensor=expert_tensor,
        microbatch_size=micro_batch_size,
        virtual_stages=virtual_stages,
        group=group_size,
        schedule=schedule,
        layers=stage_layers,
        recompute=recompute_granularity,
        recompute_layers=recompute_num_layers,
        recompute_modules=recompute_modules,
        sequence_parallel=sequence_parallel,
        distributed=distributed_optimizer,
        precision=of_products,
        flash=flash,
        causal=causal,
        overlap_messages=overlap_p2p,
        overlap_gradients=overlap_grad_reduce,
        overlap_parameters=overlap_param_gather,
        overlap_tensor=tp_comm_overlap,
        overlap_experts=overlap_experts,
        dispatcher=dispatcher,
        graphs=cuda_graph_impl,
        graph_modules=cuda_graph_modules,
        engines=targets.able,
    )
    effort = Effort(seconds=search_time, moves=search_iterations)
    hand_over(run(make_question(asked), top=top, effort=effort), files, as_json=as_json)


def _typed(context: typer.Context) -> list[str]:
    """The flags that were given."""
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(str(parameter.name))) is not None
        and source.name == "COMMANDLINE"
    ]
