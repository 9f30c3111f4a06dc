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
        told="the host: a mixture's layer launches hundreds of small kernels, and where no token "
        "is dropped it waits for counts of tokens to reach the host. What such rows took, a "
        "microbatch and layer, hardly depends on the GPU: Qwen3 30B 9 ms on B200 and 17 ms on "
        "H100 (its backward split), and 4.7 ms on B200 with tokens dropped. On GB200 the recipes "
        "capture part of it in CUDA graphs and leave the counts on the GPU. The model has gaps "
        "between kernels and no host",
        faster=True,
        models=("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"),
        gpus=("b200", "h100"),
    ),
    Cause(
        told="the head, 128,256 rows in 16 bits on the last of 8 ranks, and messages: imbalance "
        "is 10 % of the predicted step, where NVIDIA's recipes put the gradient of the head's "
        "weight off to the end (defer_embedding_wgrad_compute), which is not modelled; and of "
        "messages beside products half are hidden, as fitted without --tp-comm-overlap",
        faster=False,
        models=("Llama3-70B",),
        gpus=("h100",),
    ),
    Cause(
        told="an early run in MXFP8, slower than the same on B200 in the same release (578 against "
        "622 tokens/s a GPU); later ones with other splits are within 6 %",
        faster=True,
        models=("Llama3-405B",),
        gpus=("gb200",),
        tables=("25.09",),
    ),
    Cause(
        told="no cause found: the three rows of 25.09 on GB200, with tokens dropped, are 12 to "
        "16 % off, those of later releases at most 10 %",
        faster=True,
        models=("qwen3-235b-a22b",),
        gpus=("gb200",),
        tables=("25.09",),
    ),
)


def cause_of(job: Job, error: float) -> int | None:
    """The number of a row's cause in CAUSES, None where none is known."""
    for number, cause in enumerate(CAUSES):
        if cause.explains(job, error):
            return number
    return None
