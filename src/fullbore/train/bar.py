"""How far a comparison is: a progress bar, or a line a step where there is no terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fullbore.ir import Schedule
from fullbore.timeline import summarize
from fullbore.train.comparison import Stepped

__all__ = ["Bar", "Nobody"]


class Nobody:
    """The watcher of a rank that does not speak."""

    def prepare(self, schedule: Schedule) -> None:
        """Say nothing."""

    def stepped(self, schedule: Schedule, stepped: Stepped) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing to close."""


class Bar:
    """The watcher of the leading rank: one bar over all steps of all schedules."""

    def __init__(self, console: Console, *, schedules: int, steps: int) -> None:
        """steps: of each schedule."""
        self._console, self._steps, self._done = console, steps, 0
        self._progress = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=schedules * steps, shown="starting")
        self._progress.start()

    def prepare(self, schedule: Schedule) -> None:
        """A schedule begins to load."""
        self._progress.update(self._task, description=schedule.name, shown="loading")
        if not self._console.is_terminal:
            self._say(f"{schedule.name}: loading")

    def stepped(self, schedule: Schedule, stepped: Stepped) -> None:
        """A step is done."""
        number = self._done % self._steps + 1
        self._done += 1
        shown = f"step {number}/{self._steps}  {_figures(schedule, stepped)}"
        self._progress.update(self._task, completed=self._done, shown=shown)
        if not self._console.is_terminal:
            self._say(f"{schedule.name}: {shown}")

    def close(self) -> None:
        """Take the bar off the screen."""
        self._progress.stop()

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _figures(schedule: Schedule, stepped: Stepped) -> str:
    loss = "" if stepped.loss is None else f"loss {stepped.loss:.3f}  "
    bubble = summarize(stepped.timeline, schedule).bubble_fraction
    return f"{loss}{stepped.step_s:.3g} s  bubble {bubble:.1%}"
