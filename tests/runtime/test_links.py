"""Links: order, windows, and how long a sent tensor is kept (PEERS: never less, never more)."""

import link_jobs as jobs
from ranks import run_ranks


def test_a_sent_tensor_lives_until_its_send_has_completed_and_no_longer() -> None:
    for window in (0, 1):
        found = run_ranks(jobs.a_sent_tensor_lives_until_it_has_left, 2, window)
        assert found == [[True, True], [True]]


def test_messages_keep_their_order_and_no_more_than_the_window_is_posted() -> None:
    for window in (1, 3):
        assert run_ranks(jobs.at_most_a_window_is_posted, 2, 17, window)[1] == [window]


def test_a_closed_group_is_closed_to_all_its_ranks() -> None:
    assert run_ranks(jobs.a_group_is_closed_to_all_even_behind_a_closed_peer, 3)[0] == "closed"
