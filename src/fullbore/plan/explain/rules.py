"""Which flags Megatron-LM refuses together: a table of rules, each a small function.

A rule says what is wrong and names the flags; what would do instead is found by trying
(`nearest.py`), so that it agrees with all rules and not with this one only. What other parts of
Fullbore refuse already is said in their words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fullbore.plan.explain.broken import Broken
from fullbore.plan.explain.job import Job
from fullbore.plan.explain.rules_of_flags import FLAG_RULES
from fullbore.plan.explain.rules_of_ranks import RANK_RULES
from fullbore.plan.explain.rules_of_stages import STAGE_RULES

__all__ = ["OF_REPLICAS", "RULES", "violations"]

Rule = Callable[[Job], Iterator[str]]

RULES: tuple[Rule, ...] = (*FLAG_RULES, *RANK_RULES, *STAGE_RULES)

# What cannot be said while the devices hold no whole number of replicas.
OF_REPLICAS = ("_expert_ranks", "_batch", "_groups")

# What is no rule of Megatron-LM's: it runs, and cannot be priced.
_OURS = ("_peak",)

# Flags that a rule's words leave out, and that could be changed instead.
_ALSO: dict[str, tuple[str, ...]] = {
    "_layers": (
        "num_layers",
        "pipeline_model_parallel_size",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ),
    "_batch": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ),
    "_groups": (
        "global_batch_size",
        "micro_batch_size",
        "pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
    ),
    "_divided": ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "num_experts"),
    "_model": ("num_attention_heads", "kv_channels", "num_query_groups"),
}


def violations(job: Job) -> tuple[Broken, ...]:
    """Everything that is wrong with the flags, or has no price, in the order of the table."""
    return tuple(
        Broken(
            rule=rule.__name__,
            message=message,
            also=_ALSO.get(rule.__name__, ()),
            is_ours=rule.__name__ in _OURS,
        )
        for rule in RULES
        for message in rule(job)
    )
