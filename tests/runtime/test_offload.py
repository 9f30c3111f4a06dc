"""What leaves for the host and comes back: every kind of tensor, memory, files, and refusals."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from offload_jobs import open_files
from pipe_models import WIDTH, Block, batch, differences, gradients, mse, reference
from split_models import MODELS, stages_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fullbore.cost.measured import costs_of
from fullbore.errors import PipelineError, RankError
from fullbore.ir import Action, Placement, Program, Schedule
from fullbore.passes import offload, recompute_ahead, split_backward
from fullbore.runtime import Pipeline
from fullbore.runtime.file_host import FileHost
from fullbore.runtime.host import Pool
from fullbore.runtime.offload import Offloading
from fullbore.schedules import gpipe, looped_bfs
from fullbore.sim import simulate
from fullbore.timeline import critical_path, live_curves

M = 4


@pytest.fixture(autouse=True)
def one_thread():
    """Small products on several threads wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def away(ahead: int = 0, microbatches: int = M) -> Schedule:
    """GPipe on one rank whose activations all leave."""
    return offload(gpipe(ranks=1, microbatches=microbatches), ahead=ahead)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_every_kind_of_stage(name, split) -> None:
    stages, twins = stages_of(name, 2), stages_of(name, 2)
    schedule = gpipe(ranks=1, microbatches=3)
    schedule = offload(split_backward(schedule, delay=1) if split else schedule, ahead=1)
    with Pipeline({0: nn.Sequential(*stages)}, schedule, mse) as pipe:
        for step in range(2):
            x, y = batch(10, seed=step)
            torch.manual_seed(step)
            losses, expected = reference(twins, x.tensor_split(3), y.tensor_split(3))
            torch.manual_seed(step)
            result = pipe.step(x, y)
            assert [float(one) for one in result.losses] == losses
            assert differences(gradients(dict(enumerate(stages))), expected) == []


@pytest.mark.parametrize("recompute", [1, 2])
def test_blocks_may_be_recomputed_while_the_rest_leaves(recompute) -> None:
    stages, twins = stages_of("block", 3), stages_of("block", 3)
    with Pipeline(
        {0: nn.Sequential(*stages)}, away(), mse, recompute=recompute, record=True
    ) as pipe:
        for step in range(2):
            x, y = batch(2 * M, seed=step)
            _, expected = reference(twins, x.chunk(M), y.chunk(M))
            result = pipe.step(x, y)
            assert differences(gradients(dict(enumerate(stages))), expected) == []
    (whole,), (leaves,) = result.stage_activation_bytes, result.stage_offload_bytes
    assert 0 < leaves < whole
    # what a block is recomputed from stays, but for the first one's, which is the caller's
    inputs = (recompute - 1) * 2 * WIDTH * 4
    assert result.peak_activation_bytes[0] == whole + (M - 1) * inputs


# -- tensors ---------------------------------------------------------------------------------------


class Saves(torch.autograd.Function):
    """Saves views of one storage, of a weight, and what is no plain tensor."""

    @staticmethod
    def forward(ctx, x, weight, stage):
        base = torch.arange(24.0).reshape(4, 6) + len(stage.expected)
        views = [base, base.t(), base[1:, ::2], base[:1].expand(3, 6)]
        others = [torch.empty(0), base.to_sparse(), torch.view_as_complex(base[:, :2] * 1).conj()]
        saved = [*views, base.half(), base.bool(), weight.t(), *others]
        stage.expected.append([(tensor.clone(), _strides(tensor)) for tensor in saved])
        stage.storages.append(StorageWeakRef(base.untyped_storage()))
        ctx.save_for_backward(*saved)
        ctx.stage = stage
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.stage.found.append(ctx.saved_tensors)
        ctx.stage.gone.append([storage.expired() for storage in ctx.stage.storages])
        return gradient, None, None


def _strides(tensor):
    return tensor.stride() if tensor.layout == torch.strided else None


class SavesViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH))
        self.expected, self.found, self.storages, self.gone = [], [], [], []

    def forward(self, x):
        return Saves.apply(x * self.weight[0], self.weight, self)


def test_views_come_back_as_views_with_their_strides_and_bytes() -> None:
    stage = SavesViews()
    with Pipeline({0: stage}, away(microbatches=3), mse, record=True) as pipe:
        result = pipe.step(*batch(6))
    for expected, found in zip(stage.expected, stage.found, strict=True):
        for (one, strides), other in zip(expected, found, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.to_dense(), other.to_dense())
            assert strides == _strides(other)
        places = {view.untyped_storage().data_ptr() for view in found[:4]}
        assert len(places) == 1 and found[0].untyped_storage().nbytes() == 24 * 4
        assert found[6].untyped_storage().data_ptr() == stage.weight.untyped_storage().data_ptr()
    # the base in float32, float16 and bool, and the output that the loss saves
    assert result.stage_offload_bytes == (24 * (4 + 2 + 1) + 2 * WIDTH * 4,)
    assert stage.gone[0] == [True, True, True], "nothing of any microbatch is still where it was"


class Changes(nn.Module):
    """Changes in place what exp has saved of this microbatch, or of the one before."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.weight, self.when = nn.Parameter(torch.ones(WIDTH)), when
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        z = torch.exp(x * self.weight)
        changed = z if self.when == "in its forward" else self.seen[-1] if self.seen else None
        self.seen.append(z.detach())
        result = z * 1
        if changed is not None:
            with torch.no_grad():
                changed.add_(1)
        return result


@pytest.mark.parametrize("when", ["in its forward", "before it leaves", "once it is away"])
def test_changes_in_place_are_seen_as_autograd_sees_them(when) -> None:
    stage, schedule = Changes(when), away(microbatches=2)
    if when == "before it leaves":
        text = "0F0 0F1 0OFFLOAD0 0OFFLOAD1 0RELOAD0 0B0 0RELOAD1 0B1"
        schedule = _on_one_rank(text, microbatches=2)
    told = pytest.raises(RankError, match=r"changed in place since it was saved.*change a copy")
    with Pipeline({0: stage}, schedule, mse) as pipe, told:
        pipe.step(*batch(4))


def _on_one_rank(text: str, *, microbatches: int, stages: int = 1) -> Schedule:
    return Schedule(
        name="by hand",
        microbatches=microbatches,
        placement=Placement(stage_to_rank=(0,) * stages),
        programs=(Program.of(Action.parse(part) for part in text.split()),),
    )


def test_a_weight_that_is_changed_between_forward_and_backward_is_seen() -> None:
    stage = Block()

    def change(_module, _args, _output):
        with torch.no_grad():
            stage.twice.mul_(1.0)

    schedule = away(microbatches=2)
    with Pipeline({0: stage}, schedule, mse) as pipe:
        pipe.step(*batch(4))
        hook = stage.register_forward_hook(change)
        with pytest.raises(RankError, match="changed in place since it was saved"):
            pipe.step(*batch(4))
        hook.remove()


def test_inputs_between_stages_of_a_rank_are_let_go_and_what_was_seen_of_them_stays() -> None:
    stages = stages_of("block", 2)
    twins = stages_of("block", 2)
    seen: list[torch.Tensor] = []
    stages[1].register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    text = (
        "0F0 1F0 0OFFLOAD0 1OFFLOAD0 0F1 1F1 0OFFLOAD1 1OFFLOAD1 "
        "1RELOAD0 1B0 0RELOAD0 0B0 1RELOAD1 1B1 0RELOAD1 0B1"
    )
    schedule = _on_one_rank(text, microbatches=2, stages=2)
    x, y = batch(4)
    with Pipeline(dict(enumerate(stages)), schedule, mse) as pipe:
        for _ in range(3):
            seen.clear()
            _, expected = reference(twins, x.chunk(2), y.chunk(2))
            pipe.step(x, y)
            assert differences(gradients(dict(enumerate(stages))), expected) == []
            for part, given in zip(x.chunk(2), seen, strict=True):
                assert torch.equal(twins[0](part), given)


# -- memory and files ------------------------------------------------------------------------------


def test_memory_falls_and_rises_as_the_verifier_counts() -> None:
    stage = Block()
    whole = gpipe(ranks=1, microbatches=M)
    for ahead, live in ((0, 1), (1, 2), (2, 3)):
        schedule = offload(whole, ahead=ahead)
        with Pipeline({0: stage}, schedule, mse, record=True) as pipe:
            for _ in range(2):
                result = pipe.step(*batch(2 * M))
        (kept,) = result.stage_activation_bytes
        assert result.stage_offload_bytes == (kept,), "all that is not the caller's leaves"
        assert result.peak_activation_bytes == (live * kept,)
        (curve,) = live_curves(result.timeline, schedule, held_after_forward=[kept])
        assert curve.values[-1] == 0 and live * kept <= curve.peak <= M * kept


def test_with_a_split_backward_what_waits_for_w_is_here() -> None:
    whole = split_backward(gpipe(ranks=1, microbatches=M), delay=100)
    with Pipeline({0: Block()}, offload(whole, ahead=0), mse, record=True) as pipe:
        for _ in range(M + 1):
            result = pipe.step(*batch(2 * M))
    (kept,), (held,) = result.stage_activation_bytes, result.stage_held_bytes
    assert result.peak_activation_bytes == ((M - 1) * held + max(kept, held),)


def test_a_measured_step_knows_its_copies_and_predicts_them() -> None:
    stage, schedule = nn.Sequential(*stages_of("block", 3)), away(ahead=1)
    with Pipeline({0: stage}, schedule, mse, record=True) as pipe:
        results = [pipe.step(*batch(64 * M)) for _ in range(3)]
    timeline = results[-1].timeline
    at = {str(s.action): (s.start_s, s.end_s) for s in timeline}
    for m in range(M - 1):
        assert at[f"0F{m}"][1] <= at[f"0OFFLOAD{m}"][0] < at[f"0OFFLOAD{m}"][1]
        assert at[f"0OFFLOAD{m}"][1] <= at[f"0RELOAD{m}"][0] < at[f"0RELOAD{m}"][1]
        assert at[f"0RELOAD{m}"][1] <= at[f"0B{m}"][1]
    copies = timeline.is_copy
    assert (timeline.end_s[copies][:-1] <= timeline.start_s[copies][1:]).all()
    assert critical_path(timeline, schedule)
    costs = costs_of(
        [r.timeline for r in results],
        schedule,
        activation_bytes=results[-1].stage_activation_bytes,
        offload_bytes=results[-1].stage_offload_bytes,
    )
    (found,) = costs.stages
    assert found.offload_s > 0 and found.reload_s > 0
    assert found.offload_bytes == results[-1].stage_offload_bytes[0]
    assert simulate(schedule, costs).makespan_s > 0


def test_the_file_has_no_name_and_is_gone_with_the_pipeline(tmp_path, monkeypatch) -> None:
    pipe = Pipeline({0: Block()}, away(), mse, offload_folder=tmp_path)
    for _ in range(2):
        pipe.step(*batch(2 * M))
        assert os.listdir(tmp_path) == [] and len(open_files(str(tmp_path))) == 1
    pipe.close()
    assert open_files(str(tmp_path)) == []

    def full(*_args):
        raise OSError(28, "No space left on device")

    pipe = Pipeline({0: Block()}, away(), mse, offload_folder=tmp_path)
    pipe.step(*batch(2 * M))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(RankError, match=r"0B0.*No space left on device.*offload_folder"):
            pipe.step(*batch(2 * M))
    assert os.listdir(tmp_path) == [] and open_files(str(tmp_path)) == []
    pipe.step(*batch(2 * M))
    pipe.close()
    assert os.listdir(tmp_path) == [] and open_files(str(tmp_path)) == []


def test_a_pipeline_that_is_dropped_takes_its_file_along(tmp_path) -> None:
    pipe = Pipeline({0: Block()}, away(), mse, offload_folder=tmp_path)
    pipe.step(*batch(2 * M))
    del pipe
    gc.collect()
    assert open_files(str(tmp_path)) == []


def test_the_file_holds_what_is_away_at_once_however_sizes_change(tmp_path) -> None:
    schedule = away()
    host = FileHost(tmp_path)
    stage = Block()
    offloading = Offloading(schedule, {0: stage}, host)
    part = offloading.stages[0]
    sizes = []
    for rows in (2, 2, 5, 1, 3, 3):
        for m in range(M):
            x = torch.randn(rows, WIDTH)
            with part.forward(m):
                output = stage(x)
            left = part.leave(m, [], None)
            sizes.append(left.bytes)
            if m % 2:  # two at a time
                for back in (m - 1, m):
                    part.come_back(back, None)
                    part.arrive(back)
        del output
        (file,) = open_files(str(tmp_path))
        descriptor = next(n for n in os.listdir("/proc/self/fd") if _link(n) == file)
        largest = max(sizes)
        assert os.stat(f"/proc/self/fd/{descriptor}").st_size <= 2 * (largest + 64 * 32)
    offloading.close()


def _link(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def test_buffers_are_used_again() -> None:
    class Buffer:
        def __init__(self, size):
            self.size = size

    started = []
    pool = Pool(Buffer, lambda: started.append(1))
    one, two = pool.take(10), pool.take(20)
    assert (pool.made, pool.out) == (2, 2)
    pool.give_back(one)
    pool.give_back(two)
    assert pool.take(9) is one and pool.take(11) is two and pool.made == 2
    pool.give_back(two)
    assert pool.take(30).size == 30 and pool.made == 3  # one is still out
    before = len(started)
    pool.reset()
    assert len(started) == before + 1 and pool.take(5).size == 5


def test_evaluation_and_steps_without_copies_leave_everything_here(tmp_path) -> None:
    with Pipeline({0: Block()}, away(), mse, offload_folder=tmp_path) as pipe:
        pipe.evaluate(*batch(2 * M))
        assert open_files(str(tmp_path)) == []
    with Pipeline({0: Block()}, gpipe(ranks=1, microbatches=M), mse) as pipe:
        assert pipe.step(*batch(2 * M)).stage_offload_bytes is None


# -- what does not go together ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"recompute": "full"}, r"recompute='full' stage 0 keeps nothing that could leave"),
        ({"recompute": 1}, r"recompute=1 stage 0 keeps nothing that could leave"),
        ({"offload_folder": Path("/nowhere/at/all")}, "offload_folder: no file can be made there"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(options, told) -> None:
    with pytest.raises(PipelineError, match=told):
        Pipeline({0: Block()}, away(), mse, **options)


def test_what_is_made_again_does_not_leave() -> None:
    with pytest.raises(PipelineError, match='give recompute="placed"'):
        Pipeline({0: Block()}, recompute_ahead(gpipe(ranks=1, microbatches=M)), mse)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_compiled_stages_leave_too(split) -> None:
    """With the backend that makes graphs of its own, as a compiler's."""
    stages, twins = stages_of("block", 2), stages_of("block", 2)
    compiled = [torch.compile(stage, backend="aot_eager") for stage in stages]
    schedule = gpipe(ranks=1, microbatches=2)
    schedule = offload(split_backward(schedule) if split else schedule, ahead=0)
    with Pipeline({0: nn.Sequential(*compiled)}, schedule, mse, record=True) as pipe:
        for step in range(2):
            x, y = batch(4, seed=step)
            _, expected = reference(twins, x.chunk(2), y.chunk(2))
            result = pipe.step(x, y)
            found = gradients(dict(enumerate(stages)))
            assert differences(found, expected, exact=False) == []
    (kept,), (left,) = result.stage_activation_bytes, result.stage_offload_bytes
    assert 0 < left <= kept


def test_one_stage_offloads_and_another_recomputes() -> None:
    """`recompute="placed"`: what has an R is made again, what has an OFFLOAD leaves."""
    whole = looped_bfs(ranks=1, microbatches=M, virtual_stages=2)
    schedule = offload(recompute_ahead(whole, stages=[1]), stages=[0], ahead=0)
    kept, peaks = {}, {}
    for name, chosen, recompute in (("none", whole, "none"), ("both", schedule, "placed")):
        stages, twins = stages_of("block", 2), stages_of("block", 2)
        placed = dict(enumerate(stages))
        with Pipeline(placed, chosen, mse, record=True, recompute=recompute) as pipe:
            for step in range(2):
                x, y = batch(2 * M, seed=step)
                _, expected = reference(twins, x.chunk(M), y.chunk(M))
                result = pipe.step(x, y)
                assert differences(gradients(placed), expected) == []
        kept[name], peaks[name] = result.stage_activation_bytes, result.peak_activation_bytes
        assert (result.stage_input_bytes is None) == (recompute == "none")
    assert kept["both"] == kept["none"]
    assert peaks["none"] == (M * sum(kept["none"]),)
    assert peaks["both"] < (2 * sum(kept["none"]),)
