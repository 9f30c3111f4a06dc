"""`fullbore calibrate`: what this machine reaches, as a cluster file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fullbore.cli.options import JsonFlag
from fullbore.cli.place import is_under_torchrun, place_here, processes
from fullbore.cli.training_options import option
from fullbore.errors import ConfigError

if TYPE_CHECKING:
    from fullbore.cost.hardware.calibration import Calibrated, Measured
    from fullbore.train.calibrate import Plan

__all__ = ["calibrate"]

_MACHINE = "What is measured"
_RESULT = "Result"
_MOST = 1024  # ranks or threads that are started here
_DEVICES = ("auto", "cpu", "cuda")
_PRECISIONS = ("fp32", "bf16", "fp16")


def calibrate(
    *,
    ranks: Annotated[
        int | None,
        option(
            _MACHINE,
            "--ranks",
            metavar="N",
            help="Ranks on this machine, measured at the same time; all GPUs, or 2. Under torchrun "
            "its processes.",
        ),
    ] = None,
    device: Annotated[
        str,
        option(_MACHINE, "--device", metavar="KIND", help="auto, cpu or cuda; auto if not given."),
    ] = "auto",
    threads: Annotated[
        int | None,
        option(_MACHINE, "--threads", metavar="N", help="A rank; cores / ranks if not given."),
    ] = None,
    precision: Annotated[
        str | None,
        option(
            _MACHINE,
            "--precision",
            metavar="NAME",
            help="Of the products: fp32, bf16 or fp16; bf16 on GPUs, else fp32.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        option(_MACHINE, "--quick", help="Fewer and smaller products: seconds, not a minute."),
    ] = False,
    output: Annotated[
        Path | None,
        option(
            _RESULT,
            "--output",
            "-o",
            metavar="FILE.toml",
            help="Write the cluster file there; give it to --cluster.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine, as a cluster file.

    Matrix products, copies in memory and messages between ranks become peaks, and constants with
    which predictions come nearest to what was measured (docs/hardware.md). Ctrl-C leaves an older
    file as it was.

      fullbore calibrate -o here.toml
    """
    from fullbore.train.calibrate import Plan

    _check(ranks, threads, precision, output)
    if device not in _DEVICES:
        raise ConfigError(f"--device {device}: choose auto, cpu or cuda")
    plan = Plan(ranks=ranks or 2, device=device, threads=threads, precision=precision, quick=quick)
    busy = os.getloadavg()[0]
    measured = _measured(replace(plan, ranks=_ranks(plan, ranks)))
    if measured is not None:
        _hand_over(measured, output, _warnings(measured, threads, busy), as_json=as_json)


def _check(
    ranks: int | None, threads: int | None, precision: str | None, output: Path | None
) -> None:
    for flag, value in (("--ranks", ranks), ("--threads", threads)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: it must be 1 or more")
        if value is not None and value > _MOST:
            raise ConfigError(f"{flag} {value}: on one machine it must be at most {_MOST}")
    if precision is not None and precision not in _PRECISIONS:
        raise ConfigError(f"--precision {precision}: choose {', '.join(_PRECISIONS)}")
    if output is not None and output.suffix.lower() != ".toml":
        raise ConfigError(f"-o {output}: a cluster file is TOML; end the name in .toml")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.absolute().parent}")


def _ranks(plan: Plan, asked: int | None) -> int:
    """As asked, as torchrun started, all GPUs, or two."""
    if is_under_torchrun():
        return asked or processes()
    if asked is not None:
        return asked
    import torch

    gpus = torch.cuda.device_count() if plan.device != "cpu" else 0
    return gpus or plan.ranks


def _measured(plan: Plan) -> Measured | None:
    """What was measured; None on ranks of torchrun's other than the first."""
    from fullbore.cost.hardware.calibration import Measured

    if is_under_torchrun() or plan.ranks == 1:
        return _be_rank(plan)
    from fullbore.train.launch import launch_ranks

    with (
        tempfile.TemporaryDirectory(prefix="fullbore-") as folder,
        _progress(shown=True) as report,
    ):
        report(f"starting {plan.ranks} ranks")
        result = Path(folder) / "measured.json"
        needed = ["fullbore.train.calibrate"]
        launch_ranks(_tell_measured, plan, result, ranks=plan.ranks, imports=needed)
        return Measured.parse(json.loads(result.read_text(encoding="utf-8")))


def _tell_measured(plan: Plan, result: Path) -> None:
    """One of the ranks that were started here: the first leaves what was measured in a file."""
    measured = _be_rank(plan)
    if measured is not None:
        result.write_text(json.dumps(asdict(measured)), encoding="utf-8")


def _be_rank(plan: Plan) -> Measured | None:
    from fullbore.train.calibrate import calibrate_on_rank

    place = place_here()
    with _progress(shown=place.rank == 0) as report:
        return calibrate_on_rank(plan, place, report=report)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """One line on a terminal's stderr, and nothing where nobody looks.

    Written by hand: a rank that is stopped in the middle must not leave the cursor hidden.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda words: None
        return
    clear = "\r\x1b[2K"
    try:
        yield lambda words: print(f"{clear}{words}", end="", file=sys.stderr, flush=True)
    finally:
        print(clear, end="", file=sys.stderr, flush=True)


def _hand_over(
    measured: Measured, output: Path | None, warnings: list[str], *, as_json: bool
) -> None:
    from fullbore.cli.output import print_json, write
    from fullbore.cost.hardware.calibration import calibrated, to_toml

    found = calibrated(measured)
    for warning in warnings:
        print(f"fullbore: {warning}", file=sys.stderr)
    try:  # where one of both fails, the other is done
        if as_json:
            print_json(_document(measured, found, warnings))
        else:
            _print(measured, found)
    finally:
        if output is not None:
            write(output, to_toml(found, _notes(measured, warnings)))
            print(f"wrote {output}", file=sys.stderr)


def _warnings(measured: Measured, threads: int | None, busy: float) -> list[str]:
    """What makes times longer than they need be; busy: cores that were at work before."""
    from fullbore.cli.figures import counted
    from fullbore.train.place import cores_here

    each, cores = threads or measured.multiprocessors, cores_here()
    told = []
    if busy > cores / 2:
        told.append(
            f"other work ran before ({busy:.1f} of {counted(cores, 'core')}): times may be too long"
        )
    if not measured.is_gpu and measured.ranks_per_node * each > cores:
        told.append(
            f"{counted(measured.ranks_per_node, 'rank')} x {counted(each, 'thread')} on "
            f"{counted(cores, 'core')}: they take turns, and the times measured are of that"
        )
    return told


def _notes(measured: Measured, warnings: list[str]) -> list[str]:
    """What stands at the top of the file."""
    from fullbore.cli.figures import counted

    products = f"{len(measured.products)} products in {measured.precision}"
    notes = [f"Measured by fullbore calibrate: {counted(measured.ranks, 'rank')}, {products}."]
    if measured.pair_bytes_per_s is None:
        notes.append("Not measured with one rank: messages, node_gb_per_s and network_gb_per_s.")
    elif measured.network_bytes_per_s is None:
        notes.append("Not measured on one machine: network_gb_per_s, which is as within the node.")
    return [*notes, *warnings]


def _document(measured: Measured, found: Calibrated, warnings: list[str]) -> dict[str, object]:
    from fullbore.cost.hardware.calibration import errors_of

    products = [
        {**asdict(product), "flop_per_s": product.flop_per_s, "fit_error": error}
        for product, error in zip(measured.products, errors_of(measured, found), strict=True)
    ]
    return {
        **asdict(measured),
        "products": products,
        "base": found.base,
        "cluster": found.device.model_dump(exclude_none=True, exclude={"sources", "unofficial"}),
        "constants": found.constants.model_dump(),
        "warnings": warnings,
    }


def _print(measured: Measured, found: Calibrated) -> None:
    from fullbore.cli.figures import counted, percent, seconds
    from fullbore.cli.output import table
    from fullbore.cost.hardware.calibration import errors_of

    errors = errors_of(measured, found)
    rows = [
        [
            f"[{each.rows}, {each.inner}] x [{each.inner}, {each.columns}]",
            seconds(each.seconds),
            f"{each.flop_per_s / 1e9:.1f}",
            f"{error * 100:+.0f} %",
        ]
        for each, error in zip(measured.products, errors, strict=True)
    ]
    ranks = counted(measured.ranks, "rank")
    print(f"{measured.device}: {ranks}, {measured.precision}", "", sep="\n")
    print(table(["product", "time", "GFLOP/s", "fit"], rows), "", sep="\n")
    mean = sum(map(abs, errors)) / len(errors)
    print(f"best product      {max(measured.peaks.values()) / 1e9:.4g} GFLOP/s")
    print(
        f"fit of products   {percent(mean)} off on average, {percent(max(map(abs, errors)))} worst"
    )
    print(f"memory            {measured.copy_bytes_per_s / 1e9:.4g} GB/s, read and written")
    for name, hop_s, per_s in (
        ("within the node", measured.hop_s, measured.pair_bytes_per_s),
        ("between nodes", measured.network_hop_s, measured.network_bytes_per_s),
    ):
        if hop_s is not None and per_s is not None:
            print(f"{name:<17} {per_s / 1e9:.4g} GB/s one way, {seconds(hop_s)} a message")
