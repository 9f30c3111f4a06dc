"""The command `fullbore`, and `python -m fullbore`; torchrun starts ranks that way.

Loading the command line takes a moment, in which Ctrl-C must not print a traceback: nothing has
begun yet, so it just ends the process, as it does later on.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

__all__ = ["run"]

_INTERRUPTED = 130  # as a shell has it


def run() -> None:
    """Load the command line and run it; always raises SystemExit."""
    later = signal.signal(signal.SIGINT, _leave)
    from fullbore.cli.main import main

    signal.signal(signal.SIGINT, later)
    main()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    run()
