"""The command `fullbore`: the table of commands, and how errors of ours are told.

Exit status: 0 done; 1 a check found something; 2 bad input, with one message on stderr;
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from fullbore import __version__
from fullbore.cli.check import check
from fullbore.cli.compare import compare
from fullbore.cli.export import export
from fullbore.cli.help import GroupedCommand
from fullbore.cli.schedules import schedules
from fullbore.cli.show import show
from fullbore.cli.simulate import simulate
from fullbore.cli.train import train
from fullbore.errors import FullboreError

__all__ = ["app", "main"]

COMMANDS = (schedules, show, simulate, check, train, compare, export)

app = typer.Typer(
    name="fullbore",
    help="Pipeline schedules for training large language models: drawn, predicted, checked, run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help keeps Megatron's long flags whole, and is twice as fast
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _command in COMMANDS:
    app.command(cls=GroupedCommand)(_command)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer calls it so
    if value:
        print(f"fullbore {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of `fullbore` itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (sys.argv where no arguments are given); always raises SystemExit."""
    try:
        app(args=arguments, prog_name="fullbore")
    except FullboreError as error:
        print(f"fullbore: {error}", file=sys.stderr)
        sys.exit(2)
