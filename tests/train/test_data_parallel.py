"""Replicas train as one process does, and go on from each other's checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import training_jobs as jobs
from ranks import run_ranks as run_ranks_for

from fullbore.errors import ConfigError
from fullbore.train.checkpoint import find_checkpoint, read_progress
from fullbore.train.optimizer import owners_of

# One trains for long, on cores that others may want too.
pytestmark = pytest.mark.timeout(300)
run_ranks = partial(run_ranks_for, timeout_s=100)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


LAYOUTS = {  # how a run of two replicas of two ranks, 1F1B, goes on
    "as it was": {},
    "P 2 to 4, D 2 to 1": {"pipeline_model_parallel_size": 4, "data_parallel_size": 1},
    "P 2 to 1, D 2 to 4": {"pipeline_model_parallel_size": 1, "data_parallel_size": 4},
    "v 1 to 2": {"num_virtual_stages_per_pipeline_rank": 2},
    "gpipe": {"schedule": "gpipe"},
}


@pytest.mark.slow
def test_replicas_train_and_resume_as_one_process(folder: Path, tmp_path: Path) -> None:
    def settings(**changes: Any) -> Any:
        values = {"pipeline_model_parallel_size": 2, "data_parallel_size": 2, **changes}
        return jobs.settings_for(folder, global_batch_size=8, clip_grad=0.5, **values)

    zero = settings(use_distributed_optimizer=True, save=tmp_path / "run")
    others = [settings(**{"use_distributed_optimizer": True, **c}) for c in LAYOUTS.values()]
    going_on = [
        (one, {"steps": steps, "load": tmp_path / "run"}) for one in others for steps in (0, 3)
    ]
    runs = [
        (settings(), {"steps": 6}),
        (zero, {"steps": 6}),
        (settings(optimizer_barrier=False), {"steps": 6}),
        (zero.model_copy(update={"optimizer_barrier": False}), {"steps": 3, "save": True}),
        *going_on,
    ]
    results = run_ranks(jobs.run_several, 4, runs, timeout_s=200)
    plain, sharded, late, begun, *rest = ([found[i] for found in results] for i in range(len(runs)))

    alone = settings(pipeline_model_parallel_size=1, data_parallel_size=1)
    losses, norms = jobs.train_plainly(alone, steps=6)
    assert max(norms) > 0.5
    for found, found_norms, _ in plain:
        assert found == plain[0][0]
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-4)

    assert [part[:2] for part in sharded] == [part[:2] for part in plain]
    assert same(jobs.merged(sharded), jobs.merged(plain))
    assert [part[:2] for part in late] == [part[:2] for part in plain]  # clipped, too: see above
    assert same(jobs.merged(late), jobs.merged(plain))
    sizes = [sum(t.numel() for n, t in part[2].items() if "exp_avg" in n) for part in sharded]
    whole = [sum(t.numel() for n, t in part[2].items() if "exp_avg" in n) for part in plain]
    assert sizes[0] + sizes[1] == whole[0] and max(sizes[:2]) < 0.75 * whole[0]

    progress = read_progress(find_checkpoint(tmp_path / "run"))
    assert (progress.ranks, progress.replicas, progress.sequences) == (4, 2, 24)
    saved, whole_run = jobs.merged(begun), jobs.merged(sharded)
    for name, loaded, gone_on in zip(LAYOUTS, rest[::2], rest[1::2], strict=True):
        assert same(jobs.merged(loaded), saved), name
        assert gone_on[0][0] == pytest.approx(plain[0][0][3:], rel=1e-5), name
        for weight, value in jobs.merged(gone_on).items():
            torch.testing.assert_close(value, whole_run[weight], rtol=1e-3, atol=1e-5)
    assert same(jobs.merged(rest[1]), whole_run)  # the same layout: to the bit


def test_held_out_loss_is_the_same_over_replicas(folder: Path) -> None:
    def settings(ranks: int, replicas: int) -> Any:
        return jobs.settings_for(
            folder,
            pipeline_model_parallel_size=ranks,
            data_parallel_size=replicas,
            eval_interval=1,
            eval_iters=2,
            held_out=0.1,
        )

    alone, _ = jobs.evaluate(0, settings(1, 1))
    for found in run_ranks(jobs.evaluate_several, 2, [settings(1, 2), settings(2, 1)]):
        assert found == pytest.approx([alone] * 2, rel=1e-5)


def test_the_global_batch_is_shared_by_replicas() -> None:
    settings = jobs.settings_for(
        Path("nowhere"), global_batch_size=24, micro_batch_size=2, data_parallel_size=3
    )
    assert (settings.microbatches, settings.replica_batch_size) == (4, 8)
    assert (settings.step_sequences, settings.world_size) == (24, 3)
    with pytest.raises(ConfigError, match="24 or 30"):
        jobs.settings_for(
            Path("nowhere"), global_batch_size=26, micro_batch_size=2, data_parallel_size=3
        )
    with pytest.raises(ConfigError, match="data-parallel size is 0: the nearest legal value is 1"):
        jobs.settings_for(Path("nowhere"), data_parallel_size=0)


def test_owners_share_evenly_and_alike() -> None:
    sizes = {"big": 100, "a": 40, "b": 40, "c": 30, "d": 0}
    owners = owners_of(sizes, 2)
    assert owners == owners_of(dict(reversed(sizes.items())), 2)
    held = [sum(sizes[n] for n, owner in owners.items() if owner == r) for r in range(2)]
    assert sorted(held) == [100, 110]
    assert set(owners_of(sizes, 1).values()) == {0}
