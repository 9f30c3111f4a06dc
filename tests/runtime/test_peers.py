"""What other pipeline engines get wrong, on every schedule where it applies, with real ranks."""

from typing import Any

import peer_jobs as jobs
import pytest
import torch
from ranks import Outcome, run_outcomes, run_ranks

CASES = {
    2: [("gpipe", 4, None), ("1f1b", 4, None), ("interleaved", 4, 2), ("looped-bfs", 4, 2)],
    4: [("1f1b", 5, None), ("interleaved", 3, 2)],
}

pytestmark = pytest.mark.slow
every = pytest.mark.parametrize("ranks", [2, 4])


def run(job: Any, ranks: int, case: Any, *args: Any) -> list[Any]:
    return run_ranks(job, ranks, ranks, case, *args)


def run_all(job: Any, ranks: int, *args: Any) -> dict[Any, list[Any]]:
    """The job for every case at P ranks, in one set of processes: its values, a rank each."""
    cases = CASES[ranks]
    found = run_ranks(jobs.one_after_another, ranks, ranks, job, cases, *args)
    return {case: [values[i] for values in found] for i, case in enumerate(cases)}


def assert_nothing_differs(job: Any, ranks: int, *args: Any) -> None:
    nothing: list[str] = []
    for case, found in run_all(job, ranks, *args).items():
        assert found == [nothing] * ranks, case


@every
def test_01_evaluation_between_backward_and_step(ranks: int) -> None:
    assert_nothing_differs(jobs.evaluation_leaves_gradients_alone, ranks)


@every
def test_02_two_steps_give_the_sum_of_two(ranks: int) -> None:
    assert_nothing_differs(jobs.two_steps_add_up, ranks)


@every
def test_06_and_18_a_failure_reaches_every_rank_and_leaves_nothing(ranks: int) -> None:
    for case, values in run_all(jobs.a_step_after_a_failed_one_is_clean, ranks).items():
        stages = ranks * (case[2] or 1)
        for found in values:
            assert found["wrong"] == []
            failed = f"rank {ranks - 1} failed in {stages - 1}F1 of step 2: _Fails: on purpose"
            assert failed in found["error"]
            assert found["took_s"] < 5


@every
def test_07_unused_weights_and_outputs(ranks: int) -> None:
    assert_nothing_differs(jobs.unused_and_sometimes_used, ranks)


@every
def test_08_hooks_fire_once_a_microbatch(ranks: int) -> None:
    for values in run_all(jobs.hooks_fire_once, ranks).values():
        for found in values:
            m = found["m"]
            boundary = 0 if found["stage"] == 0 else m
            assert found["per_step"] == {"weight": m, "accumulated": m, "boundary": boundary}


@pytest.mark.parametrize("max_norm", [0.05, 1e9])
def test_09_and_10_tied_weights_and_clipping(max_norm: float) -> None:
    for case, (first, last) in run_all(jobs.tied_embedding, 2, max_norm).items():
        stages = 2 * (case[2] or 1)
        alone = jobs.tied_alone(stages, case[1], max_norm)
        assert torch.equal(first["tables"][0], last["tables"][stages - 1])
        assert first["norms"] == last["norms"]
        assert first["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        for name, value in {**last["state"], **first["state"]}.items():
            expected = alone["state"].get(name, alone["state"]["0.table.weight"])
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4)


def test_10_clipping_is_the_same_at_any_number_of_ranks() -> None:
    found = {
        ranks: run(jobs.tied_embedding, ranks, ("interleaved", 4, 4 // ranks), 0.05)
        for ranks in (1, 2, 4)
    }
    for ranks in (2, 4):
        assert found[ranks][0]["norms"] == pytest.approx(found[1][0]["norms"], rel=1e-6)
        for part in found[ranks]:
            for name, value in part["state"].items():
                torch.testing.assert_close(value, found[1][0]["state"][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [10, 4, 7])
def test_14_a_short_last_batch(rows: int) -> None:
    assert_nothing_differs(jobs.a_short_last_batch, 2, rows)


@every
def test_14_a_batch_shorter_than_m_is_one_error_everywhere(ranks: int) -> None:
    for case, errors in run_all(jobs.a_batch_that_is_too_short, ranks).items():
        expected = f"{case[1] - 1} rows along dimension 0, too few for {case[1]} microbatches"
        for error in errors:
            assert expected in error


@every
def test_15_lengths_change(ranks: int) -> None:
    assert_nothing_differs(jobs.lengths_change, ranks)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "view"])
@every
def test_16_nests_cross_boundaries(ranks: int, kind: str) -> None:
    assert_nothing_differs(jobs.nests_cross, ranks, kind)


@every
def test_17_keyword_arguments_are_not_cut_by_guess(ranks: int) -> None:
    for values in run_all(jobs.keyword_arguments, ranks).values():
        for found in values:
            assert found["wrong"] == []
            assert "give a list with one entry a microbatch" in found["refused"]


def assert_named(outcomes: list[Outcome], victim: int) -> None:
    """Every rank but the victim fails with the same error, which names it."""
    assert outcomes[victim].died == -9
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in others:
        assert outcome.error is None, outcome.trace
        assert f"rank {victim} failed" in outcome.value
        assert "the process died without a word" in outcome.value
        assert outcome.value == others[0].value


@pytest.mark.parametrize("when", ["step", "evaluation", "between", "long before"])
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_18_a_killed_rank_is_named(ranks: int, victim: int, when: str) -> None:
    case = CASES[ranks][victim % 2]
    assert_named(run_outcomes(jobs.killed, ranks, ranks, case, victim, when), victim)


def test_18_a_rank_that_is_killed_while_others_clip_is_named() -> None:
    assert_named(run_outcomes(jobs.waits_in_clipping, 4, 4, ("1f1b", 5, None)), 3)


def assert_evaluated(values: list[dict[str, Any]]) -> None:
    for one in values:
        assert one["wrong"] == [] and one["outputs_right"] and one["training"]
        assert one["losses"] == pytest.approx([one["alone"]] * 2, rel=1e-6)
        assert one["loss_without_targets"] is None


@every
def test_20_evaluate_train_evaluate(ranks: int) -> None:
    for values in run_all(jobs.evaluate_train_evaluate, ranks).values():
        assert_evaluated(values)


def test_20_evaluation_on_a_split_backward() -> None:
    assert_evaluated(run(jobs.evaluate_train_evaluate, 2, ("split", 3, None)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_21_boundary_buffers_do_not_grow_with_m(name: str) -> None:
    v = 2 if name in ("interleaved", "looped-bfs") else None
    cases = [(name, m, v) for m in (4, 32, 64)]
    counts = run_ranks(jobs.one_after_another, 2, 2, jobs.boundary_messages, cases)[0]
    assert counts[0] == counts[1] == counts[2]
    assert max(counts[2]) <= 4  # P for each of two links


@every
def test_22_outputs_that_nobody_asked_for_are_not_kept(ranks: int) -> None:
    for case, values in run_all(jobs.live_outputs, ranks).items():
        assert values[-1]["after"] == 0
        alive_by_then = {"1f1b": 1, "interleaved": ranks}.get(case[0], case[1])
        assert values[-1]["most"] <= alive_by_then, case


def test_an_activation_dies_the_moment_its_backward_is_done() -> None:
    ranks = 4
    found = run(jobs.live_activations, ranks, ("1f1b", 8, None))
    # the one in hand, just made, stands beside those that wait for their backward
    assert found == [[min(ranks - r, 8)] for r in range(ranks)]
    assert run(jobs.live_activations, 2, ("gpipe", 5, None)) == [[5], [5]]


@pytest.mark.parametrize("microbatches", [2, 32])
def test_24_no_rank_waits_for_its_own_sends(microbatches: int) -> None:
    assert run_ranks(jobs.no_rank_waits_for_its_sends, 2, 2, microbatches) == [True, True]


@every
def test_26_not_a_number_is_seen_everywhere(ranks: int) -> None:
    for losses in run_all(jobs.not_a_number, ranks).values():
        assert all(loss != loss for loss in losses)


def test_memory_that_a_stage_keeps_is_copied_before_it_is_sent() -> None:
    """A message leaves late, when its memory has been changed for the next microbatch."""
    kinds = ["buffer", "attribute", "input", "given"]
    assert run_ranks(jobs.kept_memory, 2, kinds) == [[], []]
