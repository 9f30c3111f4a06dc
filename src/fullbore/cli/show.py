"""`fullbore show`: a schedule as a picture, a file or CSV.

The format follows from the name after -o; one table says which format each ending means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fullbore.cli.inputs import CostsSource, Shape, read_schedule
from fullbore.cli.options import (
    BackwardSeconds,
    CostsFile,
    ForwardSeconds,
    GroupSize,
    HopSeconds,
    InputGradSeconds,
    JsonFlag,
    Microbatches,
    Offload,
    OffloadAhead,
    OffloadSeconds,
    OverlapFlag,
    Ranks,
    ScheduleName,
    Slices,
    VirtualStages,
    WeightGradSeconds,
)
from fullbore.cli.prediction import Prediction, describe, memory_curves, predict, slips, spans
from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.view import Panel

__all__ = ["show"]

_STDOUT = Path("-")


def show(
    schedule: ScheduleName,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    virtual_stages: VirtualStages = None,
    group_size: GroupSize = None,
    slices: Slices = None,
    offload: Offload = None,
    offload_ahead: OffloadAhead = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write FILE.svg, .html, .csv, .json or .pftrace (for Perfetto); - prints CSV.",
        ),
    ] = None,
    communication: Annotated[
        bool,
        typer.Option("--communication", help="Write sends and receives into the CSV, too."),
    ] = False,
    slack: Annotated[
        bool,
        typer.Option(
            "--slack",
            help="Say of each action by how much it may end later without moving the end, in the "
            "grid instead of its microbatch, and in JSON.",
        ),
    ] = False,
    width: Annotated[
        int | None,
        typer.Option(metavar="N", min=24, help="Columns of the grid; the terminal's if not given."),
    ] = None,
    forward_s: ForwardSeconds = None,
    backward_s: BackwardSeconds = None,
    input_grad_s: InputGradSeconds = None,
    weight_grad_s: WeightGradSeconds = None,
    hop_s: HopSeconds = None,
    offload_s: OffloadSeconds = None,
    costs: CostsFile = None,
    overlap: OverlapFlag = True,
    as_json: JsonFlag = False,
) -> None:
    """Draw a schedule, or write it as picture, trace or CSV."""
    from fullbore.cli.output import print_json

    shape = Shape(
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        group_size=group_size,
        slices=slices,
        offload=offload,
        offload_ahead=offload_ahead,
    )
    source = CostsSource(
        file=costs,
        forward_s=forward_s,
        backward_s=backward_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        hop_s=hop_s,
        offload_s=offload_s,
    )
    render = _renderer(output)
    as_csv = output is not None and render is None
    _refuse_the_meaningless(
        source, output, as_csv=as_csv, communication=communication, json=as_json
    )
    if slack and output is not None and not as_json:
        raise ConfigError(f"--slack is for the terminal and --json: leave -o {output} out")
    if output is not None and render is None:
        _write_csv(schedule, shape, output, communication=communication)
        if not as_json:
            return
    prediction = predict(schedule, shape, source, overlap=overlap)
    if output is not None and render is not None:
        _write(output, render(prediction))
    if as_json:
        print_json(_with_slack(prediction) if slack else _document(prediction))
    elif output is None:
        _draw(prediction, width, slack=slack)


def _refuse_the_meaningless(
    source: CostsSource, output: Path | None, *, as_csv: bool, communication: bool, json: bool
) -> None:
    """Flags that would be passed over in silence, since the format has no place for them."""
    if output == _STDOUT and json:
        raise ConfigError("-o - prints CSV and --json prints JSON: leave one of the two out")
    if communication and not as_csv:
        raise ConfigError("--communication is for CSV: write it with -o FILE.csv or -o -")
    typed = ["costs"] if source.file else list(source.typed())
    if as_csv and typed and not json:
        flags = ", ".join("--" + name.replace("_", "-") for name in typed)
        raise ConfigError(f"-o {output}: CSV holds no times: leave {flags} out")


def _renderer(output: Path | None) -> Callable[[Prediction], str | bytes] | None:
    """What makes this file's content from a prediction; None for CSV, which needs none."""
    if output is None or output == _STDOUT or output.suffix.lower() == ".csv":
        return None
    if output.suffix.lower() not in _RENDERERS:
        known = ", ".join((*_RENDERERS, ".csv"))
        raise ConfigError(f"-o {output}: no such format; end the name in one of {known}")
    return _RENDERERS[output.suffix.lower()]


def _write_csv(name: str, shape: Shape, output: Path, *, communication: bool) -> None:
    from fullbore.ir import to_text
    from fullbore.passes import insert_communication

    schedule = read_schedule(name, shape)
    if communication and not schedule.has_communication:
        schedule = insert_communication(schedule)
    if output == _STDOUT:
        sys.stdout.write(to_text(schedule))
    else:
        _write(output, to_text(schedule))


def _write(output: Path, content: str | bytes) -> None:
    from fullbore.cli.output import write

    write(output, content)
    print(f"wrote {output}", file=sys.stderr)


def _draw(prediction: Prediction, width: int | None, *, slack: bool) -> None:
    from fullbore.cli.figures import headline, totals
    from fullbore.cli.output import console
    from fullbore.view.text import render_grid

    screen = console()
    print(headline(prediction))
    color = screen.color_system is not None and not screen.no_color
    grid = render_grid(
        prediction.timeline,
        width=width or screen.width,
        color=color,
        slack_s=slips(prediction) if slack else None,
    )
    screen.print(grid, soft_wrap=True)
    print("", *totals(prediction), sep="\n")


def _document(prediction: Prediction) -> dict[str, object]:
    return {**describe(prediction), "spans": spans(prediction.timeline)}


def _with_slack(prediction: Prediction) -> dict[str, object]:
    """The document with `slack_s` in every span, null where nothing waits for it."""
    slack_s = [slip_s if slip_s < float("inf") else None for slip_s in slips(prediction).tolist()]
    document = _document(prediction)
    told = zip(spans(prediction.timeline), slack_s, strict=True)
    return {**document, "spans": [{**span, "slack_s": slip_s} for span, slip_s in told]}


def _panel(prediction: Prediction) -> Panel:
    from fullbore.cli.figures import facts, headline
    from fullbore.timeline import live_curves
    from fullbore.view import Panel
    from fullbore.view.panel import BYTES

    in_bytes = memory_curves(prediction)
    panel = Panel(
        title=headline(prediction),
        timeline=prediction.timeline,
        facts=facts(prediction),
        curves=live_curves(prediction.timeline, prediction.schedule),
    )
    return panel if in_bytes is None else replace(panel, curves=in_bytes, curve_unit=BYTES)


def _svg(prediction: Prediction) -> str:
    from fullbore.view import svg

    return svg.render((_panel(prediction),))


def _html(prediction: Prediction) -> str:
    from fullbore.view import html

    return html.render(title=prediction.schedule.name, panels=(_panel(prediction),))


def _perfetto(prediction: Prediction) -> bytes:
    from fullbore.view import perfetto

    return perfetto.render((_panel(prediction),))


def _json(prediction: Prediction) -> str:
    from fullbore.cli.output import to_json

    return to_json(_document(prediction))


_RENDERERS: dict[str, Callable[[Prediction], str | bytes]] = {
    ".svg": _svg,
    ".html": _html,
    ".json": _json,
    ".pftrace": _perfetto,
}
