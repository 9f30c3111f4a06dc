"""Around a split backward: hooks, what is held, what is reported, what is put back."""

import copy
import subprocess
import sys

import pytest
import torch
from pipe_models import WIDTH, Block, batch, differences, gradients, mse, reference
from split_models import Recomputed, TiedInside, stages_of
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fullbore.errors import PipelineError
from fullbore.ir import Kind
from fullbore.passes import recompute_ahead, split_backward
from fullbore.runtime import PacedStage, Pipeline, gradient_of, paced_loss, set_gradient
from fullbore.schedules import gpipe, one_f_one_b

M = 3


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alone(stage: nn.Module, schedule=None, loss=mse, **options) -> Pipeline:
    """A pipeline of one rank and one stage, its backward split."""
    return Pipeline(
        {0: stage}, schedule or split_backward(gpipe(ranks=1, microbatches=M)), loss, **options
    )


@pytest.mark.parametrize("name", ["block", "direct", "tied", "gpt", "own-function", "in-half"])
def test_peer_8_hooks_fire_once_a_weight_and_microbatch(name) -> None:
    (stage,) = stages_of(name, 1)
    fired: dict[str, list[str]] = {}
    for key, weight in stage.named_parameters():
        seen = fired.setdefault(key, [])
        if weight.requires_grad:
            weight.register_hook(lambda grad, seen=seen: seen.append(f"grad {tuple(grad.shape)}"))
            weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append("added"))
    with alone(stage) as pipe:
        for step in range(3):
            pipe.step(*batch(2 * M, seed=step))
            for key, weight in stage.named_parameters():
                each = [f"grad {tuple(weight.shape)}", "added"] if weight.requires_grad else []
                assert fired[key] == each * M, (step, key)
                fired[key].clear()


def test_a_hook_may_replace_the_gradient_and_sees_the_sum_of_two_uses() -> None:
    (stage,), (twin,) = stages_of("direct", 1), stages_of("direct", 1)
    for module in (stage, twin):
        module.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        module.bias.register_hook(lambda grad: grad * 2)
    x, y = batch(2 * M)
    with alone(stage) as pipe:
        for _ in range(2):
            _, expected = reference([twin], x.chunk(M), y.chunk(M))
            pipe.step(x, y)
            assert differences(gradients({0: stage}), expected) == []


def test_hooks_on_activations_inside_the_stage_fire_once() -> None:
    stage, calls = Block(), []

    def watch(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda grad: calls.append(1))

    stage.up.register_forward_hook(watch)
    stage.norm.register_forward_hook(watch)
    with alone(stage) as pipe:
        for _ in range(2):
            pipe.step(*batch(2 * M))
    assert len(calls) == 2 * 2 * M


@pytest.mark.parametrize("reentrant", [True, False])
def test_peer_5_one_recomputation_a_microbatch(reentrant) -> None:
    stage = Recomputed(reentrant=reentrant, count=2)
    with alone(stage) as pipe:
        for _ in range(2):
            pipe.step(*batch(2 * M))
    assert stage.calls == 2 * (2 * 2 * M)  # steps x (forward and again) x blocks x microbatches


@pytest.mark.parametrize("ahead", [None, 0])
@pytest.mark.parametrize(("recompute", "again"), [("full", 3), (2, 2), (3, 3), ("none", 0)])
def test_recompute_runs_what_it_says_once_more(recompute, again, ahead) -> None:
    stage, calls = nn.Sequential(*(Block() for _ in range(3))), []
    schedule = split_backward(gpipe(ranks=1, microbatches=M))
    if ahead is not None and recompute != "none":
        schedule = recompute_ahead(schedule, ahead=ahead)
    for block in stage:
        block.norm.register_forward_hook(lambda *_: calls.append(1))
    with alone(stage, schedule, recompute=recompute) as pipe:
        pipe.step(*batch(2 * M))
        assert len(calls) == (3 + again) * M
        pipe.evaluate(*batch(2 * M))
        assert len(calls) == (3 + again + 3) * M
    assert not stage[0]._forward_hooks and not stage[0]._forward_pre_hooks


def test_a_block_list_inside_a_stage_is_found() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Identity(), Block(), Block()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, calls = Model(), []
    for block in model.layers[1:]:
        block.norm.register_forward_hook(lambda module, *_: calls.append(module))
    with alone(model, recompute=1) as pipe:
        pipe.step(*batch(2 * M))
    first, second = model.layers[1].norm, model.layers[2].norm
    assert (calls.count(first), calls.count(second)) == (2 * M, M)


def test_hooks_that_change_a_blocks_arguments_run_once() -> None:
    stage, twin = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
    twin.load_state_dict(stage.state_dict())
    calls = []
    for model in (stage, twin):
        model[1].register_forward_pre_hook(lambda _, args: (calls.append(1), (args[0] * 2,))[1])
        model[1].register_forward_hook(lambda module, args, output: torch.tanh(output))
    x, y = batch(2 * M)
    with alone(stage, recompute=2) as pipe:
        _, expected = reference([twin], x.chunk(M), y.chunk(M))
        pipe.step(x, y)
    assert differences(gradients({0: stage}), expected) == []
    assert len(calls) == 2 * M


def test_a_schedule_with_recomputations_needs_the_option() -> None:
    with pytest.raises(PipelineError, match='give recompute="placed"'):
        alone(Block(), recompute_ahead(gpipe(ranks=1, microbatches=M)))


def test_a_stage_that_changes_its_input_cannot_be_recomputed() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x.mul_(2))

    with (
        alone(InPlace(), recompute="full") as pipe,
        pytest.raises(PipelineError, match="its input was changed in place"),
    ):
        pipe.step(*batch(2 * M))


@pytest.mark.parametrize("recompute", ["full", 1])
def test_a_stage_that_takes_a_derivative_cannot_be_recomputed(recompute) -> None:
    stage = nn.Sequential(*stages_of("penalized", 1))
    with (
        alone(stage, recompute=recompute) as pipe,
        pytest.raises(PipelineError, match="takes a derivative inside its own forward"),
    ):
        pipe.step(*batch(2 * M))


def test_a_stage_that_does_something_else_the_second_time_is_told() -> None:
    class Fickle(Block):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) if self.calls % 2 else self.norm(x)

    with (
        alone(Fickle(), one_f_one_b(ranks=1, microbatches=M), recompute="full") as pipe,
        pytest.raises(PipelineError, match="does not do the same"),
    ):
        pipe.step(*batch(2 * M))


def test_torchs_functions_are_back_after_a_step() -> None:
    before = functional.linear, torch.addmm
    with alone(Block()) as pipe:
        pipe.step(*batch(2 * M))
        assert (functional.linear, torch.addmm) == before
        pipe.evaluate(*batch(2 * M))
    assert (functional.linear, torch.addmm) == before


def test_other_weights_pass_through_while_products_are_caught() -> None:
    other, outside = nn.Linear(WIDTH, WIDTH), []

    class Mixed(Block):
        def forward(self, x):
            (grad,) = torch.autograd.grad(other(x.detach()).sum(), other.weight)
            outside.append(grad)
            return super().forward(x)

    stage, twin = Mixed(), Mixed()
    twin.load_state_dict(stage.state_dict())
    x, y = batch(2 * M)
    with alone(stage) as pipe:
        for _ in range(2):
            pipe.step(x, y)
            _, expected = reference([twin], x.chunk(M), y.chunk(M))
    assert differences(gradients({0: stage}), expected) == []
    assert all(grad.abs().sum() > 0 for grad in outside)


def test_a_weight_that_no_microbatch_used_has_no_gradient() -> None:
    class Unused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            self.spare(x)
            return super().forward(x)

    stage = Unused()
    with alone(stage) as pipe:
        pipe.step(*batch(2 * M))
        pipe.step(*batch(2 * M))
    assert stage.spare.weight.grad is None and stage.spare.bias.grad is None


def test_what_waits_is_what_products_need_and_w_frees_it() -> None:
    """Two products of 4 rows: 12 -> 24 and 24 -> 12, so x and gradients of 4 x 72 numbers."""
    stage = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    number, rows = 4, 4
    held = number * rows * (WIDTH + 2 * WIDTH + 2 * WIDTH + WIDTH)
    own_input = number * rows * WIDTH  # the caller's, which stays anyway
    split = split_backward(gpipe(ranks=1, microbatches=M), delay=100)
    for schedule, waiting in ((split, M), (split_backward(split), M)):
        with alone(stage, schedule, record=True) as pipe:
            for _ in range(2):
                result = pipe.step(*batch(rows * M))
        assert result.stage_held_bytes == (held - own_input,)
        (activation,) = result.stage_activation_bytes
        assert result.peak_activation_bytes == (max(M * activation, waiting * (held - own_input)),)


def test_bytes_of_recomputed_stages() -> None:
    """With R each microbatch holds its input until its turn comes."""

    def measured(schedule, recompute):
        torch.manual_seed(0)
        first, second = (nn.Sequential(Block(), Block()) for _ in range(2))
        stages = {0: nn.Sequential(first, second)}
        with Pipeline(stages, schedule, mse, record=True, recompute=recompute) as pipe:
            for _ in range(2):
                result = pipe.step(*batch(4 * M))
        return result

    whole = gpipe(ranks=1, microbatches=M)
    plain = measured(whole, "none")
    (activation,) = plain.stage_activation_bytes
    assert plain.peak_activation_bytes == (M * activation,)
    for schedule in (whole, recompute_ahead(whole)):
        full = measured(schedule, "full")
        assert full.stage_activation_bytes == (activation,)
        assert full.peak_activation_bytes == (activation,)  # the input is the caller's


def test_the_report_names_what_goes_with_i() -> None:
    (stage,) = stages_of("tied", 1)
    with alone(stage) as pipe:
        pipe.step(*batch(2 * M))
        pipe.step(*batch(2 * M))
        (report,) = pipe.split_report()
    assert report.stage == 0
    assert set(report.queued) == {"first.weight", "first.bias", "second.bias"}
    assert set(report.with_input) == {"table.weight", "both"}
    assert report.queued_matrix_elements == WIDTH**2
    assert report.share_with_input == pytest.approx(2 / 3)


class Doubling(TorchFunctionMode):
    """Means something of its own by torch's linear."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is functional.linear else result


def test_a_function_mode_around_a_step_sees_torchs_functions() -> None:
    stage, twin = Block(), Block()
    twin.load_state_dict(stage.state_dict())
    x, y = batch(2 * M)
    with alone(stage) as pipe, Doubling():
        for _ in range(2):
            _, expected = reference([twin], x.chunk(M), y.chunk(M))
            pipe.step(x, y)
        assert differences(gradients({0: stage}), expected) == []


def test_what_has_no_memory_weighs_nothing() -> None:
    with alone(*stages_of("tangent", 1), record=True) as pipe:
        assert pipe.step(*batch(2 * M)).stage_activation_bytes[0] > 0


def test_a_whole_backward_has_no_report() -> None:
    with alone(Block(), gpipe(ranks=1, microbatches=M)) as pipe:
        pipe.step(*batch(2 * M))
        assert pipe.split_report() == ()


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_main_gradients_are_the_sum_in_more_bits(split) -> None:
    torch.manual_seed(0)
    stage, twin = TiedInside().bfloat16(), TiedInside().bfloat16()
    twin.load_state_dict(stage.state_dict())
    schedule = gpipe(ranks=1, microbatches=M)
    stage.first.requires_grad_(False)  # not from the start
    x, y = (part.bfloat16() for part in batch(2 * M))
    expected: dict[str, torch.Tensor] = {}
    with alone(
        stage, split_backward(schedule) if split else schedule, main_grad_dtype=torch.float32
    ) as pipe:
        for is_trained in (False, True):  # from the second step on
            for model in (stage, twin):
                model.first.requires_grad_(is_trained)
            for part, target in zip(x.chunk(M), y.chunk(M), strict=True):
                (mse(twin(part), target) / M).backward()
                for name, weight in twin.named_parameters():
                    if weight.grad is not None:
                        expected[name] = expected.get(name, 0) + weight.grad.float()
                twin.zero_grad()
            pipe.step(x, y)
        for name, weight in stage.named_parameters():
            assert weight.grad is None and weight.main_grad.dtype == torch.float32
            assert torch.equal(gradient_of(weight), expected[name])
        norm = pipe.clip_grad_norm(1e-3)
        total = torch.stack([g.double().norm() for g in expected.values()]).norm()
        assert norm == pytest.approx(float(total), rel=1e-6)
        after = torch.stack([p.main_grad.double().norm() for p in stage.parameters()]).norm()
        assert float(after) == pytest.approx(1e-3, rel=1e-3)
        set_gradient(weight, None)
        assert weight.main_grad is None
    assert "main_grad" not in vars(weight)


@pytest.mark.parametrize("what", ["stage", "inside"])
def test_compiled_stages_go_with_i_and_stay_right(what) -> None:
    stages, twins = stages_of("gpt", 2), stages_of("gpt", 2)
    compiled = torch.compile(stages[0], backend="aot_eager")
    stage = compiled if what == "stage" else nn.Sequential(compiled, stages[1])
    reference_stages = twins[:1] if what == "stage" else twins
    for schedule in (
        gpipe(ranks=1, microbatches=M),
        split_backward(gpipe(ranks=1, microbatches=M)),
    ):
        with alone(stage, schedule) as pipe:
            for step in range(2):
                for module in (*stages, *twins):
                    module.zero_grad()
                x, y = batch(2 * M, seed=step)
                _, expected = reference(reference_stages, x.chunk(M), y.chunk(M))
                pipe.step(x, y)
                found = gradients(dict(enumerate(stages)))
                close = {n: g for n, g in found.items() if n in expected}
                assert differences(close, expected, exact=False) == []
    (report,) = pipe.split_report()
    assert report.queued == () and report.share_with_input == 1.0
    assert any("_orig_mod" in name for name in report.with_input)


def test_what_is_compiled_after_a_split_step_knows_torchs_functions() -> None:
    """torch.compile once learnt the replaced functions, and broke its graphs at every product."""
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
import torch
from pipe_models import batch, mse
from split_models import Recomputed
from fullbore.passes import split_backward
from fullbore.runtime import Pipeline
from fullbore.schedules import gpipe
schedule = split_backward(gpipe(ranks=1, microbatches=2))
with Pipeline({{0: Recomputed(reentrant=False)}}, schedule, mse) as pipe:
    pipe.step(*batch(4))
compiled = torch.compile(torch.nn.Linear(4, 4), backend="eager", fullgraph=True)
compiled(torch.zeros(2, 4)).sum().backward()
f = torch.compile(lambda x: torch.addmm(x, x, x), backend="eager", fullgraph=True)
f(torch.ones(2, 2))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ran.returncode == 0, ran.stderr


def test_a_paced_stage_sleeps_in_both_halves() -> None:
    stage = PacedStage(forward_s=0.001, backward_s=0.03, weight_grad_s=0.02)
    whole = gpipe(ranks=1, microbatches=2)
    for schedule, least_s in (
        (whole, {Kind.B: 0.03}),
        (split_backward(whole, delay=2), {Kind.I: 0.01, Kind.W: 0.02}),
    ):
        with alone(stage, schedule, paced_loss, record=True) as pipe:
            timeline = pipe.step(*batch(4)).timeline
        for kind, slept_s in least_s.items():
            took_s = (timeline.end_s - timeline.start_s)[timeline.kind == kind]
            assert len(took_s) == 2 and (took_s >= slept_s).all()
            assert took_s.min() < slept_s + 0.01  # no whole backward in a half


class Counts(nn.Module):
    """Batch norm's statistics, a weight made by power iteration, a buffer that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.linear(self.norm(x)) * self.seen.sqrt()


@pytest.mark.parametrize("recompute", ["full", 2])
@pytest.mark.parametrize("ahead", [None, 1])
def test_buffers_change_once_where_a_forward_runs_twice(recompute, ahead) -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(Counts(), Counts())
    twin = copy.deepcopy(stage)
    schedule = split_backward(gpipe(ranks=1, microbatches=M))
    if ahead is not None:
        schedule = recompute_ahead(schedule, ahead=ahead)
    with alone(stage, schedule, recompute=recompute) as pipe:
        for step in range(2):
            x, y = batch(4 * M, seed=step)
            _, expected = reference([twin], x.chunk(M), y.chunk(M))
            pipe.step(x, y)
            assert differences(gradients({0: stage}), expected) == []
            wanted = dict(twin.named_buffers())
            assert all(torch.equal(b, wanted[name]) for name, b in stage.named_buffers())
