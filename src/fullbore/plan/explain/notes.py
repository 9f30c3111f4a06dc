"""Flags that change nothing, flags that the prediction leaves out, and flags that nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from fullbore.cost.model.legal import has_module
from fullbore.cost.model.megatron import is_tokenizer_assumed
from fullbore.plan.explain.catalog import GONE, LAUNCHER, LOOKED_AT, flag
from fullbore.plan.explain.job import Job, Refused

__all__ = ["Notes", "notes_of"]

_ALIKE = 0.84  # of two names: --tensor-parallel-size is meant for --tensor-model-parallel-size
_OF_EXPERTS = ("moe_", "expert_")
_GRAPHS = ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """ignored: flags that Megatron-LM does not heed beside the others, in words. unpriced: what the
    prediction leaves out or assumes, in words. unknown: names with what they may be meant for.
    unread: names of flags that were not looked at.
    """

    ignored: tuple[str, ...]
    unpriced: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]
    unread: tuple[str, ...]


def notes_of(job: Job) -> Notes:
    """What there is to say of a job's flags besides violations and figures."""
    rest = [n for n in job.flags if n not in LOOKED_AT and n not in GONE and n not in LAUNCHER]
    meant = {name: get_close_matches(name, LOOKED_AT, n=1, cutoff=_ALIKE) for name in rest}
    return Notes(
        ignored=tuple(_ignored(job)),
        unpriced=tuple(_unpriced(job)),
        unknown=tuple((flag(name), flag(found[0])) for name, found in meant.items() if found),
        unread=tuple(sorted(flag(name) for name, found in meant.items() if not found)),
    )


def _ignored(job: Job) -> Iterator[str]:
    replicas = job.data * job.context
    if job.tensor == 1 and job.has("sequence_parallel"):
        yield "--sequence-parallel: --tensor-model-parallel-size is 1, and Megatron-LM turns it off"
    if job.has("num_query_groups") and not job.has("group_query_attention"):
        yield (
            "--num-query-groups: without --group-query-attention every head has keys and values of "
            "its own"
        )
    if replicas == 1:
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            if job.has(name):
                yield f"{flag(name)}: there is one replica"
    if job.has("cuda_graph_modules") and not any(job.has(name) for name in _GRAPHS):
        yield "--cuda-graph-modules: without --cuda-graph-impl nothing is captured"
    yield from _ignored_recompute(job)
    yield from _ignored_stages(job)
    if not job.has("num_experts"):
        for name in job.flags:
            if name.startswith(_OF_EXPERTS) and name in LOOKED_AT and job.size(name) == 1:
                yield f"{flag(name)}: without --num-experts there are none"


def _ignored_recompute(job: Job) -> Iterator[str]:
    if job.granularity is None:
        for name in ("recompute_method", "recompute_num_layers", "recompute_modules"):
            if job.has(name):
                yield f"{flag(name)}: without --recompute-granularity nothing is recomputed"
    elif job.granularity == "full" and job.has("recompute_modules"):
        yield "--recompute-modules: --recompute-granularity full recomputes all of a layer"
    elif job.granularity == "selective" and not isinstance(job.shape, Refused):
        for module in job.recompute_modules:
            if not has_module(job.shape, module):
                yield f"--recompute-modules {module}: the model has none"
    if job.has("recompute_activations") and job.word("recompute_granularity") == "full":
        yield "--recompute-granularity full: --recompute-activations makes it selective"


def _ignored_stages(job: Job) -> Iterator[str]:
    if isinstance(job.virtual_stages, Refused) or job.interleaved:
        return
    for name, why in (
        (
            "microbatch_group_size_per_virtual_pipeline_stage",
            "a rank has one stage and nothing interleaves",
        ),
        ("no_overlap_p2p_communication", "plain 1F1B overlaps no messages anyway"),
        ("overlap_p2p_communication", "plain 1F1B overlaps no messages"),
    ):
        if job.has(name):
            yield f"{flag(name)}: {why}"


def _unpriced(job: Job) -> Iterator[str]:
    if is_tokenizer_assumed(job.flags):
        yield (
            "neither --vocab-size nor --tokenizer-type is given: GPT-2's vocabulary of 50257, as "
            "pretrain_gpt.py does"
        )
    if not (job.has("bf16") or job.has("fp16")):
        yield "neither --bf16 nor --fp16 is given: everything in fp32, as Megatron-LM does"
    if job.has("rampup_batch_size"):
        yield "--rampup-batch-size: figures are those of the full batch"
    if _uniform_layers(job) > 1:
        yield (
            f"--recompute-method uniform --recompute-num-layers {_uniform_layers(job)}: priced as "
            "one layer at a time"
        )
    yield from _unpriced_states(job)
    yield from _processes(job)


def _uniform_layers(job: Job) -> int:
    is_uniform = job.granularity == "full" and job.word("recompute_method") == "uniform"
    return job.size("recompute_num_layers") if is_uniform else 1


def _unpriced_states(job: Job) -> Iterator[str]:
    if job.word("optimizer") not in (None, "adam", "sgd"):
        yield f"--optimizer {job.word('optimizer')}: its states and its time are taken to be Adam's"
    if job.word("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params"):
        yield (
            "--data-parallel-sharding-strategy: gradients and weights are taken to be whole on "
            "each replica, so memory is less than predicted"
        )
    for name in ("use_torch_fsdp2", "cpu_offloading_num_layers", "optimizer_cpu_offload"):
        if job.has(name):
            yield f"{flag(name)}: not priced; memory is less than predicted"
    if job.expert > 1 and job.word("moe_token_dispatcher_type") in (None, "allgather"):
        yield (
            "--moe-token-dispatcher-type allgather, which Megatron-LM takes if not told otherwise: "
            "priced as alltoall"
        )
    if job.has("moe_expert_capacity_factor"):
        yield "--moe-expert-capacity-factor: tokens are taken to be spread evenly, none dropped"
    groups = job.number("num_query_groups") if job.has("group_query_attention") else None
    if groups is not None and job.tensor > groups:
        yield (
            f"--tensor-model-parallel-size {job.tensor} is more than --num-query-groups {groups}: "
            "older releases of Megatron Core refuse that"
        )
    node = job.cluster.device.gpus_per_node
    if job.tensor > node:
        yield (
            f"--tensor-model-parallel-size {job.tensor} spans nodes of {node}: every layer waits "
            "for the network"
        )


def _processes(job: Job) -> Iterator[str]:
    """The script may start another number of processes than the cluster has devices."""
    numbers = [job.flags.get(name, ()) for name in ("nproc_per_node", "nnodes")]
    if all(len(words) == 1 and words[0].isdecimal() for words in numbers):
        per_node, nodes = (int(words[0]) for words in numbers)
        if per_node * nodes != job.cluster.size:
            yield (
                f"the script starts {nodes} x {per_node} processes (--nnodes, --nproc_per_node); "
                f"figures are for the {job.cluster.size} devices of {job.cluster.name}"
            )
