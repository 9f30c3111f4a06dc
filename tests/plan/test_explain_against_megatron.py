"""The rules of `fullbore explain` against Megatron Core itself, where it is installed."""

from __future__ import annotations

import random

import pytest

from fullbore.cost.hardware import Cluster
from fullbore.plan.explain import Job
from fullbore.plan.explain.rules import violations

BASE = {
    "num_layers": ("12",),
    "hidden_size": ("1024",),
    "num_attention_heads": ("16",),
    "ffn_hidden_size": ("2816",),
    "swiglu": (),
    "normalization": ("RMSNorm",),
    "disable_bias_linear": (),
    "position_embedding_type": ("rope",),
    "vocab_size": ("32000",),
    "seq_length": ("1024",),
    "max_position_embeddings": ("1024",),
    "micro_batch_size": ("1",),
    "global_batch_size": ("96",),
    "bf16": (),
}
# What may be drawn beside it: each flag with its values, () for a switch.
DRAWN = {
    "tensor_model_parallel_size": ["1", "2", "3", "4", "8"],
    "pipeline_model_parallel_size": ["1", "2", "3", "4", "6"],
    "sequence_parallel": [()],
    "num_query_groups": ["1", "2", "4", "8", "16"],
    "num_layers": ["10", "11", "12", "13", "24"],
    "num_virtual_stages_per_pipeline_rank": ["1", "2", "3", "5"],
    "decoder_first_pipeline_num_layers": ["2", "3", "4"],
    "decoder_last_pipeline_num_layers": ["2", "3", "4"],
    "account_for_embedding_in_pipeline_split": [()],
    "account_for_loss_in_pipeline_split": [()],
    "pipeline_model_parallel_layout": [
        "Et*6|t*6L",
        "Et*3|t*3|t*3|t*3L",
        "E|t*6|t*6|L",
        "t*6|t*6",
        "Et*6|t*5L",
        "Et*4|t*4|t*4L",
    ],
    "recompute_granularity": ["full", "selective"],
    "recompute_method": ["uniform", "block"],
    "recompute_num_layers": ["1", "2"],
    "distribute_saved_activations": [()],
    "cpu_offloading_num_layers": ["1", "4", "30"],
    "no_overlap_p2p_communication": [()],
    "overlap_p2p_communication_warmup_flush": [()],
    "fp16": [()],
    "num_experts": ["6", "8"],
    "expert_model_parallel_size": ["2", "4"],
}
CHUNKS = "num_virtual_stages_per_pipeline_rank"


def drawn(seed):
    """A set of flags, a few of those above."""
    dice = random.Random(seed)
    flags = dict(BASE)
    for name in dice.sample(sorted(DRAWN), dice.randint(1, 6)):
        value = dice.choice(DRAWN[name])
        flags[name] = value if isinstance(value, tuple) else (value,)
        if name == "num_query_groups":
            flags["group_query_attention"] = ()
    return flags


def refusal(megatron, job):
    """What Megatron Core says of the configuration that `arguments.py` makes of flags, or None."""
    import torch

    v = job.virtual_stages if isinstance(job.virtual_stages, int) else job.size(CHUNKS)
    interleaved = v > 1
    overlap = interleaved and not job.has("no_overlap_p2p_communication")
    offloaded = job.number("cpu_offloading_num_layers") or 0
    first, last = (job.number(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    layout = job.flags.get("pipeline_model_parallel_layout")
    experts = job.number("num_experts")
    try:
        megatron.TransformerConfig(
            num_layers=job.size("num_layers"),
            hidden_size=1024,
            num_attention_heads=16,
            num_query_groups=job.number("num_query_groups"),
            ffn_hidden_size=2816,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            tensor_model_parallel_size=job.tensor,
            pipeline_model_parallel_size=job.pipeline,
            virtual_pipeline_model_parallel_size=v if interleaved else None,
            expert_model_parallel_size=job.expert,
            num_moe_experts=experts,
            sequence_parallel=job.sequence_parallel,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            account_for_embedding_in_pipeline_split=bool(job.ends[0]),
            account_for_loss_in_pipeline_split=bool(job.ends[1]),
            pipeline_model_parallel_layout=layout[0] if layout else None,
            recompute_granularity=job.granularity,
            recompute_method=job.word("recompute_method"),
            recompute_num_layers=job.number("recompute_num_layers"),
            distribute_saved_activations=job.has("distribute_saved_activations"),
            cpu_offloading=offloaded > 0,
            cpu_offloading_num_layers=offloaded,
            bf16=True,
            fp16=job.has("fp16"),
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            overlap_p2p_comm=overlap,
            batch_p2p_comm=not overlap,
            overlap_p2p_comm_warmup_flush=job.has("overlap_p2p_communication_warmup_flush"),
        )
    except (ValueError, AssertionError, NotImplementedError) as error:
        return str(error) or type(error).__name__
    return None


def is_of_core(job, broken):
    """Whether Megatron Core says it, and not `arguments.py` or what is built later."""
    ends = ("first", "last")
    uneven = any(job.has(f"decoder_{end}_pipeline_num_layers") for end in ends)
    if broken.rule == "_layers":
        return job.pipeline > 2 and (uneven or any(job.ends)) and not job.has(CHUNKS)
    return broken.rule in ("_recompute_full", "_offload")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_megatron_core_refuses_is_a_violation_and_the_other_way_round():
    megatron = pytest.importorskip("megatron.core.transformer")
    cluster = Cluster.parse("h100:12x8")
    missed, invented, counts = [], [], {True: 0, False: 0}
    for seed in range(1500):
        job = Job(flags=drawn(seed), cluster=cluster)
        found, said = violations(job), refusal(megatron, job)
        counts[said is None] += 1
        told = {name: words for name, words in job.flags.items() if BASE.get(name) != words}
        if said is not None and not found:
            missed.append((told, said))
        if said is None and any(is_of_core(job, one) for one in found):
            invented.append((told, [one.message for one in found]))
    assert not missed, missed[:5]
    assert not invented, invented[:5]
    assert min(counts.values()) > 300, counts
