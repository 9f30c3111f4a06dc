"""Split backwards on real ranks: bit for bit the gradients of one process."""

import pytest
from ranks import run_ranks
from split_jobs import Case, compare, fails_in_an_input_half

SHAPES = [
    Case(family, m, v, delay=delay, mixed=mixed)
    for m in (1, 3, 8)
    for family, v, delay, mixed in (
        ("1f1b", None, 0, False),
        ("1f1b", None, 3, True),
        ("gpipe", None, 2, False),
        ("interleaved", 2, 2, False),
        ("interleaved", 2, 0, True),
    )
]
MODELS = [
    Case("1f1b", 5, delay=2, model=model)
    for model in ("adapted", "gpt", "tied", "twisted", "in-half", "half-frozen")
]
PEER_3 = [
    Case("1f1b", 4, delay=1, frozen=1),
    Case("1f1b", 4, delay=2, frozen=1, model="adapted"),
    Case("interleaved", 4, 2, delay=2, frozen=2),
    Case("gpipe", 3, delay=1, frozen=1, mixed=True),
]
PEER_5 = [
    Case("1f1b", 4, delay=1, model="reentrant"),
    Case("1f1b", 4, delay=2, mixed=True, model="checkpoint"),
    Case("1f1b", 4, delay=2, recompute="full"),
    Case("1f1b", 4, delay=2, recompute="full", ahead=0),
    Case("interleaved", 4, 2, delay=1, recompute="full", ahead=2, mixed=True),
]


def assert_nothing_differs(ranks: int, cases: list[Case]) -> None:
    for found in run_ranks(compare, ranks, ranks, cases):
        assert found == {case: [] for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_equal_one_process(ranks: int) -> None:
    assert_nothing_differs(ranks, SHAPES)


@pytest.mark.slow
def test_gradients_of_other_stages_and_peer_3_frozen_leading_stages() -> None:
    assert_nothing_differs(2, MODELS + PEER_3)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_peer_5_recomputation(ranks: int) -> None:
    cases = [case for case in PEER_5 if case.model == "block"] if ranks == 4 else PEER_5
    assert_nothing_differs(ranks, cases)


@pytest.mark.slow
def test_a_failure_between_the_halves_leaves_nothing() -> None:
    for found in run_ranks(fails_in_an_input_half, 2, 2, Case("1f1b", 4, delay=2)):
        assert "rank 0 failed in 0I1 of step 2: ValueError: on purpose" in found["error"]
        assert found["wrong"] == [] and found["linear is torch's"]
