"""Every schedule of the family through the engine: gradients bit for bit, tied weights, memory."""

from pathlib import Path
from types import SimpleNamespace

import family_jobs as jobs
import pytest
from family_jobs import Case
from ranks import run_ranks

from fullbore.errors import ScheduleError
from fullbore.ir import Placement
from fullbore.schedules import FAMILIES, build
from fullbore.verify import check_runnable, verify

RUN = [family.name for family in FAMILIES if family.runs and not family.takes_slices]
WAVES = [Case("hanayo", 3, 4), Case("gis", 5, 3), Case("gis-h", 5, 3), Case("gis", 2, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 3), (2, 4), (4, 3), (4, 8)])
def test_gradients_equal_one_process_bit_for_bit(ranks: int, microbatches: int) -> None:
    cases = [Case(name, microbatches) for name in RUN]
    cases += WAVES if microbatches == 3 else []
    for found in run_ranks(jobs.compare, ranks, ranks, cases):
        assert found == {case: [] for case in cases}


def test_gradients_of_a_single_rank() -> None:
    cases = [Case(name, 3) for name in ("zb-h2", "zb-v", "v-half", "gis", "hanayo", "dualpipe-v")]
    assert run_ranks(jobs.compare, 1, 1, cases) == [{case: [] for case in cases}]


@pytest.mark.parametrize("made_by", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_a_file_of_pytorchs_runs(tmp_path: Path, made_by: str) -> None:
    peer = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [
        SimpleNamespace(
            num_stages=4,
            group_size=2,
            group_rank=0,
            stage_index=2 * chunk,
            is_first=chunk == 0,
            is_last=False,
            submod=jobs.nn.Identity(),
        )
        for chunk in range(2)
    ]
    file = tmp_path / "theirs.csv"
    getattr(peer, made_by)(stages, 5)._dump_csv(file, format="compute_only")
    case = Case(str(file), 5)
    assert case.schedule(2).placement == Placement.v(ranks=2)
    assert run_ranks(jobs.compare, 2, 2, [case]) == [{case: []}] * 2


@pytest.mark.slow
def test_files_of_ours_run_in_pytorch(tmp_path: Path) -> None:
    cases = []
    for name in ("1f1b", "zb-h1", "zb-v", "v-half", "gis", "hanayo", "dualpipe-v"):
        build(name, ranks=2, microbatches=4).to_csv(tmp_path / f"{name}.csv")
        cases.append(Case(str(tmp_path / f"{name}.csv"), 4))
    assert run_ranks(jobs.in_torch, 2, 2, cases) == [{case: [] for case in cases}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_tied_weights_of_stages_that_share_a_rank_or_do_not(ranks: int) -> None:
    cases = [Case(name, 2 * ranks) for name in ("zb-v", "v-min", "hanayo", "dualpipe-v", "zb-h2")]
    cases += [Case("zb-v", 3), Case("gis", 3)]
    for found in run_ranks(jobs.compare_tied, ranks, ranks, cases):
        assert found == {case: [] for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_held_is_what_the_verifier_counts(ranks: int) -> None:
    cases = [Case(name, 3 * ranks) for name in RUN]
    measured = run_ranks(jobs.live, ranks, ranks, cases)
    for case in cases:
        schedule = case.schedule(ranks)
        most = [found[case] for found in measured]
        assert most == jobs.counted(schedule), case
        unit = schedule.activation_unit
        assert verify(schedule, peak_limit=[m * unit for m in most]) == []
        one_less = verify(schedule, peak_limit=[(m - 1) * unit for m in most])
        assert {violation.rank for violation in one_less} == set(range(ranks))


def test_what_cannot_be_run_is_refused_by_name_before_anything_starts() -> None:
    for family in FAMILIES:
        schedule = build(family.name, ranks=2, microbatches=2)
        if family.runs:
            check_runnable(schedule)
        else:
            with pytest.raises(ScheduleError, match=f"^{family.name} .* simulate it"):
                check_runnable(schedule)
