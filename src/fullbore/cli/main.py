"""The command `fullbore`: the table of commands, and how errors of ours are told.

Exit status: 0 done; 1 a check found something; 2 bad input, with one message on stderr;
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from errno import ENOSPC, EPIPE
from io import TextIOWrapper
from typing import Annotated

import typer

from fullbore import __version__
from fullbore.cli.calibrate import calibrate
from fullbore.cli.check import check
from fullbore.cli.compare import compare
from fullbore.cli.explain import explain
from fullbore.cli.export import export
from fullbore.cli.help import GroupedCommand
from fullbore.cli.model import model
from fullbore.cli.plan import plan
from fullbore.cli.schedules import schedules
from fullbore.cli.search import search
from fullbore.cli.show import show
from fullbore.cli.simulate import simulate
from fullbore.cli.train import train
from fullbore.errors import FullboreError

__all__ = ["app", "main"]

COMMANDS = (
    *(schedules, show, simulate, search, plan, explain, check, model),
    *(train, compare, export, calibrate),
)

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
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # no terminal is too old for a multiplication sign
    try:
        _run(arguments)
    except FullboreError as error:
        print(f"fullbore: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # where typer does not catch it
        sys.exit(130)
    except OSError as error:
        if error.errno not in (ENOSPC, EPIPE) or error.filename is not None:
            raise
        _give_up_stdout()
        if error.errno == EPIPE:  # nobody reads any more: no mistake, and nobody to tell
            sys.exit(1)
        print(f"fullbore: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _run(arguments: Sequence[str] | None) -> None:
    """Run the command, and write out what stdout still holds while errors can be told."""
    try:
        app(args=arguments, prog_name="fullbore")
    finally:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.flush()


def _give_up_stdout() -> None:
    """Let the rest go nowhere: the interpreter would try once more at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
