"""`fullbore explain`: someone's Megatron flags as they are, before anyone waits for a node."""

from __future__ import annotations

from typing import Annotated

import typer

from fullbore.cli.options import JOB, Cluster, JsonFlag
from fullbore.cli.training_options import option

__all__ = ["explain"]

_RESULT = "Result"


def explain(
    *,
    megatron: Annotated[
        str | None,
        option(
            JOB,
            "--megatron",
            metavar="FLAGS",
            help="Megatron-LM's arguments in quotes, a .sh or .yaml file, or - for stdin.",
        ),
    ] = None,
    cluster: Cluster = None,
    memory_limit: Annotated[
        str | None,
        option(
            JOB,
            "--memory-limit",
            metavar="X",
            help="What a device may hold, such as 70GB; all of its memory if not given.",
        ),
    ] = None,
    top: Annotated[
        int, option(_RESULT, "--top", metavar="N", help="How many changes to list.")
    ] = 5,
    as_json: JsonFlag = False,
) -> None:
    """Say what Megatron-LM's flags will get, and which are illegal.

    Lists everything that Megatron-LM would refuse, each with the nearest legal values; the memory
    of every rank, the bubble, step time, MFU and HFU; and of all single changes of flags the one
    that helps most. Where flags are illegal, figures are those of flags mended as told.

      fullbore explain --megatron train.sh --cluster h100:8x8

      cat flags.txt | fullbore explain --megatron - --cluster a100:16x8

    Exit status: 0 where the flags are legal and the job fits its memory, 1 where not.
    """
    from fullbore.cli.explain_run import Asked, run

    if not run(
        Asked(
            megatron=megatron,
            cluster=cluster,
            memory_limit=memory_limit,
            top=top,
            as_json=as_json,
        )
    ):
        raise typer.Exit(1)
