"""Why rows are more than 15 % off: what the model leaves out, where that is known.

A cause is named by what it applies to, not found by the size of the error: rows under it are off in
one direction, and those that do not share it are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from jobs import Job

__all__ = ["CAUSES", "Cause", "cause_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """models, gpus, tables: of which a row must have one, any where empty. faster: whether the
    prediction is too fast for it.
    """

    told: str
    faster: bool
    models: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()

    def explains(self, job: Job, error: float) -> bool:
        """Whether a row that is off by this is one of those."""
        return (
            (error < 0) is self.faster
            and (not self.models or job.model in self.models)
            and (not self.gpus or job.gpu in self.gpus)
            and (not self.tables or any(name in job.table for name in self.tables))
        )


CAUSES = (
    Cause(
        told="the row: it has the microbatches of 2 sequences and v = 24 of the release before, "
        "and the recipe of its own release has 1 and 12. With these it is 2.8 % off",
        faster=True,
        models=("qwen3-30b-a3b",),
        gpus=("h100",),
        tables=("25.11",),
    ),
    Cause(
        told="dropped tokens: padded to a capacity, Megatron Core finds them by sorting a map of "
        "tokens and experts, and copies them with kernels that are not fused; priced as without "
        "drops",
        faster=True,
        models=("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"),
        gpus=("gb200", "b200"),
        tables=("25.09",),
    ),
    Cause(
        told="more kernels than are counted, where 16 and 32 experts a rank leave the host behind: "
        "those of plain all-to-all, and gradients of weights in a pass of their own beside "
        "--overlap-moe-expert-parallel-comm. The releases after it are 5 and 7 % off",
        faster=True,
        models=("qwen3-235b-a22b", "deepseek-v3"),
        gpus=("b200",),
        tables=("25.11",),
    ),
    Cause(
        told="an early run in MXFP8, slower than the same on B200 in the same release (578 against "
        "622 tokens/s a GPU); its split in plain fp8 took 6.13 s in NeMo 25.04",
        faster=True,
        models=("Llama3-405B",),
        gpus=("gb200",),
        tables=("25.09",),
    ),
    Cause(
        told="experts' tokens cast to MXFP8 one expert at a time: 16 a rank on GB200, 13 % off in "
        "the releases after it",
        faster=True,
        models=("qwen3-30b-a3b",),
        gpus=("gb200",),
        tables=("25.11",),
    ),
    Cause(
        told="kernels that are new in 26.06: experts' casts, products and activation in one "
        "(a fused grouped MLP), and attention in 8 bits; neither is modelled",
        faster=False,
        models=("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"),
        gpus=("gb200",),
        tables=("26.06",),
    ),
)


def cause_of(job: Job, error: float) -> int | None:
    """The number of a row's cause in CAUSES, None where none is known."""
    for number, cause in enumerate(CAUSES):
        if cause.explains(job, error):
            return number
    return None
