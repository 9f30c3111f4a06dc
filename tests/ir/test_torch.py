"""Schedules travel to PyTorch and back: its files load here, ours load there, in both formats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from fullbore.cost import Costs
from fullbore.ir import Kind, Schedule
from fullbore.passes import insert_communication, strip_communication
from fullbore.schedules import (
    FAMILIES,
    build,
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_v,
)
from fullbore.sim import simulate
from fullbore.timeline import summarize
from fullbore.verify import verify

torch = pytest.importorskip("torch")
peer = pytest.importorskip("torch.distributed.pipelining.schedules")

Format = Literal["compute_only", "compute_comms"]
FORMATS: list[Format] = ["compute_only", "compute_comms"]
# PyTorch knows neither copies of a model nor slices of a sequence.
TRAVELLING = [f.name for f in FAMILIES if f.name not in ("dualpipe", "seq1f1b")]
SHAPES = [(1, 1, 1), (1, 2, 3), (2, 1, 4), (2, 2, 4), (4, 2, 8), (4, 2, 10), (4, 3, 3), (3, 4, 6)]


def stages(ranks: int, virtual: int) -> list[Any]:
    """What PyTorch's schedules ask of rank 0's stages before they run: no process group."""
    return [
        SimpleNamespace(
            num_stages=ranks * virtual,
            group_size=ranks,
            group_rank=0,
            stage_index=chunk * ranks,
            is_first=chunk == 0,
            is_last=False,
            submod=torch.nn.Identity(),
        )
        for chunk in range(virtual)
    ]


def theirs_as_ours(theirs: Any, path: Path, file_format: Format) -> Schedule:
    theirs._dump_csv(path, format=file_format)
    return Schedule.from_csv(path)


def ours_as_theirs(ours: Schedule, path: Path, file_format: Format) -> Any:
    ours.to_csv(path)
    runtime = peer._PipelineScheduleRuntime(
        stages(ours.ranks, ours.virtual_stages), ours.microbatches
    )
    runtime._load_csv(path, format=file_format)
    return runtime


def simulated(runtime: Any) -> dict[int, list[Any]]:
    """PyTorch's own dry run; it knows nothing of the actions that shard weights."""
    sharding = {peer.UNSHARD, peer.RESHARD, peer.REDUCE_GRAD}
    runtime.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type not in sharding]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    return runtime._simulate()


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), SHAPES)
@pytest.mark.parametrize("made_by", ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"])
def test_their_files_load_and_are_lawful(
    tmp_path: Path,
    made_by: str,
    ranks: int,
    virtual: int,
    microbatches: int,
    deferred: bool,
    file_format: Format,
) -> None:
    theirs = getattr(peer, made_by)(stages(ranks, virtual), microbatches, defer_pp_recv=deferred)
    ours = theirs_as_ours(theirs, tmp_path / "theirs.csv", file_format)
    assert (ours.ranks, ours.virtual_stages, ours.microbatches) == (ranks, virtual, microbatches)
    assert ours.has_communication == (file_format == "compute_comms" and ranks > 1)
    assert verify(ours) == []


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize(
    "made_by", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
)
def test_their_zero_bubble_files_load_and_are_lawful(
    tmp_path: Path, made_by: str, file_format: Format
) -> None:
    theirs = getattr(peer, made_by)(stages(4, 2), 8)
    ours = theirs_as_ours(theirs, tmp_path / "theirs.csv", file_format)
    assert ours.splits_backward
    assert verify(ours) == []
    in_a_v = (0, 1, 2, 3, 3, 2, 1, 0)
    looped = (0, 1, 2, 3, 0, 1, 2, 3)
    assert ours.placement.stage_to_rank == (looped if "Interleaved" in made_by else in_a_v)


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), SHAPES)
def test_their_interleaving_is_ours(
    tmp_path: Path, ranks: int, virtual: int, microbatches: int
) -> None:
    theirs = peer.ScheduleInterleaved1F1B(stages(ranks, virtual), microbatches)
    ours = interleaved(
        ranks=ranks,
        microbatches=microbatches,
        virtual_stages=virtual,
        microbatch_group_size=max(ranks, microbatches // max(1, microbatches // ranks)),
    )
    assert theirs_as_ours(theirs, tmp_path / "theirs.csv", "compute_only") == ours


V_SHAPES = [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (7, 15), (8, 16)]


@pytest.mark.parametrize(("ranks", "microbatches"), V_SHAPES)
def test_their_dualpipe_v_is_ours(tmp_path: Path, ranks: int, microbatches: int) -> None:
    theirs = theirs_as_ours(
        peer.ScheduleDualPipeV(stages(ranks, 2), microbatches),
        tmp_path / "theirs.csv",
        "compute_only",
    )
    assert theirs == dualpipe_v(ranks=ranks, microbatches=microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), V_SHAPES)
def test_their_zb_v_is_ours_but_for_which_w_is_next(
    tmp_path: Path, ranks: int, microbatches: int
) -> None:
    theirs = theirs_as_ours(
        peer.ScheduleZBVZeroBubble(stages(ranks, 2), microbatches),
        tmp_path / "theirs.csv",
        "compute_only",
    )
    ours = zb_v(ranks=ranks, microbatches=microbatches)
    assert theirs.placement == ours.placement
    costs = Costs.uniform(
        stages=2 * ranks, forward_s=1.5, input_grad_s=1.25, weight_grad_s=0.75, hop_s=0.01
    )
    found = [summarize(simulate(schedule, costs), schedule) for schedule in (theirs, ours)]
    assert found[0] == found[1]
    for their, our in zip(theirs.programs, ours.programs, strict=True):
        assert np.array_equal(their.kind, our.kind)
        others = their.kind != Kind.W
        assert their.select(others) == our.select(others)


def test_their_looped_bfs_is_ours_but_for_the_order_of_backwards(tmp_path: Path) -> None:
    theirs = theirs_as_ours(
        peer.ScheduleLoopedBFS(stages(2, 2), 3), tmp_path / "theirs.csv", "compute_only"
    )
    ours = looped_bfs(ranks=2, microbatches=3, virtual_stages=2)
    assert str(theirs.programs[1]) == "1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0"
    assert str(ours.programs[1]) == "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2"


@pytest.mark.parametrize(("made_by", "ours"), [("GPipe", gpipe), ("1F1B", one_f_one_b)])
def test_their_single_stage_orders_are_ours(made_by: str, ours: Any) -> None:
    theirs = getattr(peer, f"Schedule{made_by}")(stages(4, 1)[0], 6)
    compute = {kind.name for kind in Kind if kind < Kind.SEND_F}
    rows = [
        " ".join(
            str(action)
            for action in actions
            if action is not None and action.computation_type.value in compute
        )
        for _, actions in sorted(theirs._get_pipeline_order().items())
    ]
    expected = [str(program) for program in ours(ranks=4, microbatches=6).programs]
    if made_by == "1F1B":  # the order that PyTorch prints for its last rank begins at microbatch 1
        rows, expected = rows[:-1], expected[:-1]
    assert rows == expected


def test_slices_are_refused_there_not_taken_for_sequences(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="2SLICES"):
        ours_as_theirs(
            build("seq1f1b", ranks=1, microbatches=2, slices=2), tmp_path / "o", "compute_only"
        )


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize(
    "name", [f.name for f in FAMILIES if f.name not in ("dualpipe", "seq1f1b")]
)
@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), SHAPES)
def test_our_files_load_there_and_run_in_their_simulator(
    tmp_path: Path, name: str, ranks: int, virtual: int, microbatches: int, file_format: Format
) -> None:
    takes = next(f.takes_virtual_stages for f in FAMILIES if f.name == name)
    virtual = max(2, virtual - virtual % 2) if name == "hanayo" else virtual
    ours = build(
        name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual if takes else None
    )
    if file_format == "compute_comms":
        ours = insert_communication(ours)
    theirs = ours_as_theirs(ours, tmp_path / "ours.csv", file_format)
    placement = ours.placement.stage_to_rank
    assert theirs.stage_index_to_group_rank == dict(enumerate(placement))
    ran = simulated(theirs)
    computed = strip_communication(ours)
    for rank, program in enumerate(computed.programs):
        compute = [a for a in ran[rank] if a is not None and a.is_compute_op]
        assert list(map(str, compute)) == list(map(str, program))
    if file_format == "compute_comms":
        assert sum(a is not None for actions in ran.values() for a in actions) == ours.actions


@pytest.mark.parametrize("file_format", FORMATS)
def test_there_and_back_again(tmp_path: Path, file_format: Format) -> None:
    ours = interleaved(ranks=4, microbatches=8, virtual_stages=2)
    if file_format == "compute_comms":
        ours = insert_communication(ours)
    theirs = ours_as_theirs(ours, tmp_path / "ours.csv", file_format)
    assert theirs_as_ours(theirs, tmp_path / "back.csv", file_format) == ours
