"""`fullbore export`: a checkpoint as a folder that `transformers` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint, or the folder that --save had, whose newest is taken.",
        ),
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A new folder for the Hugging Face model.")
    ],
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    from fullbore.train.export import export as write

    print(f"exported {write(checkpoint, folder)}")
